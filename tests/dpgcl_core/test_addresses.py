"""Secrets in addresses: whatever a generated address hides is in no message, text or library's error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
import requests
import sqlalchemy
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dpgcl_core.addresses
from dpgcl_core.addresses import hide_arguments, masked, masked_text, text_of_error
from dpgcl_core.errors import DpgclError, LedgerError, TrackingError
from dpgcl_core.ledger.store import LedgerStore
from trainers.data.loading import check_dataset_name
from trainers.files.storage import storage_root
from trainers.tracking.mlflow_server import check_address

# Whatever surrounds it, a piece of the secret that a reader could use begins so.
_MARK = "Xq7"
_HARD = st.text(st.sampled_from("/@#%?&=;:,\\ '\"[]+ab9"), max_size=6)
SECRETS = st.builds(lambda a, b, c: f"{a}{_MARK}{b}{_MARK}{c}", _HARD, _HARD, _HARD)
SCHEMES = st.sampled_from(
    (
        "postgresql",
        "postgresql+psycopg",
        "mysql",
        "http",
        "https",
        "s3",
        "ray",
        "sqlite",
        "mssql+pyodbc",
        "HTTP",
    )
)
USERS = st.sampled_from(("", "me", "me.you"))
NAMES = st.sampled_from(("password", "token", "key", "sslpassword", "sig", "whatever", "PASSWORD", _MARK))


@st.composite
def addresses(draw: st.DrawFn) -> str:
    """An address with the mark in some place where people put secrets, escaped or not."""
    scheme, user, secret = draw(SCHEMES), draw(USERS), draw(SECRETS)
    hidden = quote(secret, safe="") if draw(st.booleans()) else secret
    simple = quote(secret, safe="")
    host = draw(st.sampled_from(("h", "db.example:5432", "[::1]:1", "h1,h2:3", "")))
    if scheme == "sqlite":
        return f"sqlite:///{draw(st.sampled_from(('', '/')))}d/m.db?{draw(NAMES)}={simple}"
    return draw(
        st.sampled_from(
            (
                f"{scheme}://{user}:{hidden}@{host or 'h'}/db",
                f"{scheme}://{user}:{hidden}@{host or 'h'}",
                f"{scheme}:/{user}:{hidden}@{host}/db",
                f"{scheme}:{user}:{hidden}@{host}/db",
                f"{scheme}:///{user}:{hidden}@{host}/db",
                f"{scheme}://{user}:{hidden}@{host}/db?sslmode=require",
                f"{scheme}://{host or 'h'}/db?{draw(NAMES)}={simple}",
                f"{scheme}://{host or 'h'}/db?sslmode=require&{draw(NAMES)}={simple}&x={simple}",
                f"{scheme}://{host or 'h'}/db?{simple}",
                f"{scheme}://{host or 'h'}/db#{hidden}",
                f"{scheme}://{host or 'h'}/db;password={hidden}",
                f"{scheme}://{user or 'u'}:x{_MARK}/db",
                f"{scheme}://h:{_MARK}/db",
                f"host={host} user=me password={hidden}",
                f"password='{hidden}' host={host}",
                f"me:{hidden}@{host or 'h'}:6379",
            )
        )
    )


@given(addresses())
@example(f"postgresql://me:1/{_MARK}@h/db")
@example(f"postgresql://me:1?sslmode={_MARK}@h/db")
@example(f"postgresql://me:1#{_MARK}@h/db")
@example(f"postgresql://h:1/db?password=a@b/{_MARK}")
@example(f"postgresql://h:1/db%3Fpassword%3D{_MARK}")
@settings(max_examples=400, deadline=None, derandomize=True)
def test_masked_address_shows_no_piece_of_its_secret(address: str) -> None:
    assert _MARK not in masked(address)
    assert masked(masked(address)) == masked(address)


def _said(call: Callable[[], object], of: str | None = None) -> str:
    """What a call tells of itself: its error, without a cause that a traceback would print, or its value."""
    try:
        made = call()
    except DpgclError as error:
        return f"{error} {error.__cause__ or ''}"
    except Exception as error:
        assert of is not None
        return text_of_error(error, of)
    return repr(made) + made.name if isinstance(made, LedgerStore) else ""


@given(addresses())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_refusal_shows_a_secret(address: str) -> None:
    for refuse in (
        lambda: LedgerStore.at(address),
        lambda: check_address(address),
        lambda: storage_root(Path(address)),
        lambda: check_dataset_name(address),
        lambda: check_dataset_name(f"parquet:{address}"),
    ):
        assert _MARK not in _said(refuse), refuse


@given(addresses().filter(lambda address: not set(" '\"") & set(address)))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_an_address_inside_a_text_is_masked(address: str) -> None:
    for text in (f"got '{address}'", f"{address}: refused", f"see {address}, and more"):
        assert _MARK not in masked_text(text)
        assert _MARK not in str(DpgclError(text))


@given(addresses())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_text_of_a_library_that_repeats_a_piece_is_withheld(address: str) -> None:
    for library in (
        sqlalchemy.make_url,
        psycopg.conninfo.conninfo_to_dict,
        lambda url: requests.Request("GET", url).prepare(),
    ):
        assert _MARK not in _said(lambda: library(address), of=address)  # noqa: B023


def test_addresses_without_a_secret_are_shown_whole() -> None:
    for address in (
        "/data/my@home/ledger.db",
        "ledger.db",
        "sqlite:////data/ledger=1/m.db",
        "postgresql://dpgcl@/postgres?host=/tmp/pg",
        "http://127.0.0.1:5000",
        "https://tracking.example/mlflow",
        "127.0.0.1:6379",
        "ray://head:10001",
        "parquet:/data/year=2024/x.parquet",
        "shards:s3://team/year=2024/s-{000..255}.tar",
    ):
        assert masked(address) == address
        assert masked_text(f"at {address}, now") == f"at {address}, now"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:/u:PW@h",
        "postgresql:u:PW@h",
        "host=h password=PW",
        "postgresql://u:PW@h:port/db",
        "me:PW@h",
    ],
)
def test_address_that_is_none_is_no_sqlite_path(url: str) -> None:
    with pytest.raises(LedgerError, match="not a ledger's URL") as caught:
        LedgerStore.at(url)
    assert "PW" not in str(caught.value)


@pytest.mark.parametrize("port", ["99999", "0"])
def test_wrong_port_is_one_line(port: str) -> None:
    with (
        pytest.raises(LedgerError) as caught,
        LedgerStore.at(f"postgresql://u:PW@127.0.0.1:{port}/db").reading(),
    ):
        pass
    assert "PW" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_mlflow_address_after_a_single_slash_is_refused_masked() -> None:
    with pytest.raises(TrackingError) as caught:
        check_address("postgresql:/u:PW@h")
    assert "PW" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells no other system's argument place")
def test_password_on_the_command_line_is_overwritten_for_others() -> None:
    code = (
        "import sys, pathlib, runpy; assert runpy.run_path(sys.argv[1])['hide_arguments']();"
        "print(pathlib.Path('/proc/self/cmdline').read_bytes()); assert 'u:P' 'W@' in sys.argv[3]"
    )
    options = ["--ledger", "postgresql://u:PW@h/db", "--storage", "/data", "--tracking-uri=http://u:PW@h"]
    found = subprocess.run(
        [*(sys.executable, "-c", code, str(dpgcl_core.addresses.__file__)), *options],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PW" not in found.stdout
    assert "--ledger" in found.stdout
    assert "/data" in found.stdout


def test_command_line_without_a_secret_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "x",
        "folder:/data/key=1/pass",
        "--storage",
        "/srv/token=1/u@h:/x",
        "--to=./secret=a",
        "--ledger",
        "/data/l.db",
        "--dataset",
        "npz:/d/x.npz",
        "--group-sizes",
        "2",
        "batch",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    assert not hide_arguments()
