"""Nothing private in anything that a sweep writes: planted secrets, and a search through all of it.

Two real sweeps are alike but for `--data-is`: in every training each private-only metric has a value of its
own, all records begin with the same pixels, and three of four trainings end in an exception that carries a
record. On private data none of it may be found: not in the storage folder (results, checkpoints, statement,
MLflow's database and artifacts, figures), the ledger and its export, the home folder, Ray's results and
session logs, nor on the terminal. On public data the same search must find all of it, or it proves nothing.

Who may see what. The operator's terminal is trusted: how many files of a data set cannot be read, or how
many ids repeat, is told there before anything starts, and nowhere else. Ray's logs and the checkpoints are
for the trusted side, too, because of the records in memory and the weights; but a metric, or words of a
record, are not to be in them either. What a network of the user's own prints is the user's affair.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch

from dpgcl_core.ledger.__main__ import main as ledger_command
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.release.metrics import METRICS, Release
from tests.sweeps import kept, planted, telling
from tests.sweeps.leaks import files, number, pixels, search, unpacked, words
from tests.sweeps.support import ROOT, environment, run_script, train_here
from tests.trainers.conftest import make_config, make_held_out, make_records
from trainers.config.training import EvaluationConfig
from trainers.files.checkpoint import CheckpointFolder
from trainers.training import release
from trainers.training.loop import TrainingData, train

NUMBERS = [number(name, value) for name, value in planted.METRICS.items()]
RECORD = [
    pixels("pixels", planted.PIXELS),
    words("words", planted.WORDS),
    words("label", planted.LABEL),
    words("file name", planted.FILE_NAME),
]
CANARIES = [*NUMBERS, *RECORD]


def test_every_private_only_metric_is_planted() -> None:
    assert set(planted.METRICS) == {m.name for m in METRICS.values() if m.release is Release.PRIVATE_ONLY}


# The search itself

VALUE = planted.METRICS["train_loss"]
FLOATS = np.frombuffer(planted.PIXELS, dtype=np.uint8).astype(np.float32)


WRITTEN: list[Callable[[float], bytes]] = [
    lambda value: repr(value).encode(),
    lambda value: f"{value:.4g}".encode(),
    lambda value: f"{value:.6g},".encode(),
    lambda value: f"{value:,.2f}".encode(),
    lambda value: f"{value:.8e}".encode(),
    lambda value: f"{value / 1e9:.12f}".encode(),
    lambda value: json.dumps({"metric": [1, value]}).encode(),
    lambda value: pickle.dumps({"metric": value}),
    lambda value: pickle.dumps({"metric": value}, protocol=0),
    lambda value: np.array([1.0, value], dtype=np.float32).tobytes(),
    lambda value: np.array([1.0, value]).tobytes(),
    lambda value: struct.pack(">d", value),
    lambda value: b64encode(np.array([1.0, value, 2.0]).tobytes()),
]
NAMES = sorted(planted.METRICS)
# Every metric, and every way to write one; that the search compares values, not names, needs no more.
PAIRS = [(WRITTEN[i % len(WRITTEN)], NAMES[i % len(NAMES)]) for i in range(max(len(WRITTEN), len(NAMES)))]
PAIRS += [(write, "train_loss") for write in WRITTEN]


@pytest.mark.parametrize(("write", "metric"), PAIRS)
def test_search_finds_a_number(write: Callable[[float], bytes], metric: str) -> None:
    content = b"before " + write(planted.METRICS[metric]) + b" after"
    assert metric in search(NUMBERS, unpacked("x", content))


@pytest.mark.parametrize(
    "write",
    [
        lambda row: row,
        lambda row: row.hex().encode(),
        lambda row: repr(row).encode(),
        lambda row: json.dumps(repr(row)).encode(),
        lambda row: str(list(row)).encode(),
        lambda row: repr(np.frombuffer(row, dtype=np.uint8)).encode(),
        lambda row: (FLOATS / 255).tobytes(),
        lambda row: (FLOATS / 127.5 - 1).tobytes(),
        lambda row: str((FLOATS / 255).tolist()).encode(),
        lambda row: str((FLOATS / 127.5 - 1).tolist()).encode(),
        lambda row: b64encode(b"123" + row + b"1234567"),
    ],
)
def test_search_finds_a_record(write: Callable[[bytes], bytes]) -> None:
    assert "pixels" in search(RECORD, unpacked("x", b"a " + write(planted.PIXELS) + b" z"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_search_finds_words(encoding: str) -> None:
    assert "words" in search(RECORD, unpacked("x", f"error: {planted.WORDS}!".encode(encoding)))


def _zip(content: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner", content)
    return target.getvalue()


def _tar(content: bytes) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        member = tarfile.TarInfo("inner")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def _zstd(content: bytes) -> bytes:
    target = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(target, "zstd") as stream:
        stream.write(content)
    return bytes(target.getvalue())


def _checkpoint(content: bytes) -> bytes:
    target = io.BytesIO()
    torch.save({"series": {"loss": [(0, VALUE)]}, "text": planted.WORDS}, target)
    return _zip(target.getvalue() + content)


def _database(content: bytes) -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE metrics (value REAL, text BLOB)")
    connection.execute("INSERT INTO metrics VALUES (?, ?)", (VALUE, content))
    connection.commit()
    return connection.serialize()


@pytest.mark.parametrize(
    "pack", [_zip, _tar, _zstd, _checkpoint, _database, gzip.compress, bz2.compress, lzma.compress]
)
def test_search_unpacks(pack: Callable[[bytes], bytes]) -> None:
    content = pack(gzip.compress(planted.WORDS.encode() + repr(VALUE).encode()))
    assert {"train_loss", "words"} <= set(search(CANARIES, unpacked("x", content)))


def test_search_reads_names_of_files(tmp_path: Path) -> None:
    (tmp_path / f"{planted.LABEL}.txt").touch()
    assert set(search(CANARIES, files(tmp_path))) == {"label"}


def test_search_finds_nothing_where_nothing_is(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    (tmp_path / "noise").write_bytes(generator.bytes(200_000))
    (tmp_path / "numbers").write_text(" ".join(map(str, generator.uniform(0, 1e6, 20_000))))
    assert search(CANARIES, files(tmp_path)) == {}


# Scores of private records

COUNT = 961473.125


@pytest.mark.ci
@pytest.mark.parametrize("noise_is_left_out", [False, True])
def test_search_finds_private_scores_only_where_their_noise_is_left_out(
    noise_is_left_out: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evaluation = EvaluationConfig(
        also_untrained=False, score_on_held_out=0.3, score_noise_multiplier=1e5, max_query_records=20
    )
    config = make_config(evaluation=evaluation, num_steps=2, num_records_public=42)
    count = COUNT * config.num_scored_public
    names = ("knn_accuracy", "linear_probe_accuracy")
    monkeypatch.setattr(release, "correct_counts", lambda *given: dict.fromkeys(names, count))
    if noise_is_left_out:
        monkeypatch.setattr(release, "noised_count", lambda exact, *given, **named: exact)
    index, queries = make_records(40, prefix="public"), make_records(20, prefix="public query")
    data = TrainingData(
        **make_held_out(0.3),
        index=index,
        queries=queries,
        train_is_public=False,
        evaluation_is_public=True,
    )
    result = train(config, data, checkpoints=CheckpointFolder(tmp_path, every_steps=1))
    (tmp_path / "result.json").write_text(json.dumps(result.metrics))
    found = search([number("count", COUNT)], files(tmp_path))
    places = {Path(place.split("#")[0]).name for place in found.get("count", ())}
    assert places == ({"checkpoint.pt", "result.json"} if noise_is_left_out else set())


# Whole sweeps


@dataclass
class Searched:
    """What a sweep ended with, and where each secret was found."""

    code: int
    said: str
    found: dict[str, set[str]]

    def kinds(self) -> set[str]:
        """The kinds of places where a metric was found."""
        places = {p.split("#")[0] for name in planted.METRICS for p in self.found.get(name, ())}
        return {place if place.startswith("<") else Path(place).name for place in places}


ARGUMENTS = (
    *("--tiny", "--noise-multiplier=1", "--no-non-private", "--name=one", "--repeats=4"),
    *(f"--num-steps={planted.NUM_STEPS}", "--expected-batch-size=32", "--record-every-steps=1"),
    *("--checkpoint-every-steps=3", "--num-records-public=120"),
    *("--min-crop-area=1", "--flip-prob=0", "--brightness=0", "--contrast=0"),
    *("--evaluate-on=digits", "--network=tests.sweeps.planted:network", "--dataset-id=scans"),
)


@pytest.fixture
def planting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the planted network changes in the process that trains is undone after the test."""
    train_here(monkeypatch)
    with planted.planting():
        yield


def _places() -> list[object]:
    return [vars(place)[name] for place, name, _ in planted._plants()]


def test_plants_are_taken_away_again() -> None:
    before = _places()
    with planted.planting():
        planted.network((1, 8, 8))
        assert not any(now is then for now, then in zip(_places(), before, strict=True))
    assert all(now is then for now, then in zip(_places(), before, strict=True))


def test_nothing_is_planted_where_it_would_stay() -> None:
    before = _places()
    with pytest.raises(RuntimeError, match="would reach later tests"):
        planted.network((1, 8, 8))
    assert all(now is then for now, then in zip(_places(), before, strict=True))


@pytest.mark.ci
@pytest.mark.parametrize("data_are", ["private", "public"])
def test_sweep_in_this_process_leaves_secrets_of_public_data_alone(
    data_are: str, planting: None, tmp_path: Path, empty_database: Path
) -> None:
    """As the whole sweeps below, but for what Ray writes and says; one training succeeds, one fails."""
    storage, ledger = tmp_path / "storage", str(tmp_path / "ledger" / "ledger.db")
    storage.mkdir()
    shutil.copy(empty_database, storage)
    data = planted.write_records(tmp_path / "own", 120)
    Ledger.create(ledger).register("scans", Cap(epsilon=40.0, delta=1e-4), num_records_public=120)
    where = (f"--dataset={data}", f"--data-is={data_are}", f"--ledger={ledger}", f"--storage={storage}")
    code, out, err = run_script(
        "group_size", *(each.replace("repeats=4", "repeats=2") for each in ARGUMENTS), *where
    )
    assert code == 1
    assert "failed: S4-Na1-private-r1 (" in out
    places = [*unpacked("<stdout>", out.encode()), *unpacked("<stderr>", err.encode())]
    found = search(CANARIES, [*places, *files(storage, Path(ledger).parent)])
    if data_are == "private":
        assert found == {}, out
    else:
        assert set(found) >= {*planted.METRICS, "pixels", "words"}, out


@pytest.mark.ci
def test_errors_of_a_users_network_tell_no_secret_of_private_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_database: Path
) -> None:
    """Errors of this package's own classes, by a network of the user's own; of public data they are shown."""
    train_here(monkeypatch)
    canary = words("secret", telling.SECRET)
    for data_are in ("private", "public"):
        storage = tmp_path / data_are
        storage.mkdir()
        shutil.copy(empty_database, storage)
        data = planted.write_records(tmp_path / "own", 120)
        arguments = [each for each in ARGUMENTS if not each.startswith(("--network", "--dataset-id"))]
        arguments += ["--network=tests.sweeps.telling:network", "--repeats=6", "--no-ledger", "--num-steps=2"]
        where = (f"--dataset={data}", f"--data-is={data_are}", f"--storage={storage}")
        code, out, err = run_script("group_size", *arguments, *where)
        assert code == 1
        found = search([canary], [*unpacked("<stdout>", (out + err).encode()), *files(storage)])
        if data_are == "public":
            assert found
            continue
        assert found == {}, out
        told = dict(re.findall(r"failed: S4-Na1-private-r(\d) \((.*?) \(its message is withheld", out))
        names = ("ConfigError", "LedgerError", "ConfigError", "an error", "ConfigError")
        assert told == dict(zip("12345", names, strict=True)), out


def searched_sweep(top: Path, scratch: Path, data_are: str) -> Searched:
    """Runs a sweep whose trainings hold all secrets, and searches everything it leaves."""
    home, ledger = top / "home", str(top / "ledger" / "ledger.db")
    home.mkdir()
    data = planted.write_records(top / "own", 120)
    Ledger.create(ledger).register("scans", Cap(epsilon=40.0, delta=1e-4), num_records_public=120)
    arguments = (*ARGUMENTS, f"--dataset={data}", f"--data-is={data_are}", f"--ledger={ledger}")
    ended = subprocess.run(
        [sys.executable, "-m", kept.__name__, *arguments, f"--storage={top / 'storage'}"],
        capture_output=True,
        cwd=home,
        env=environment(
            home, DPGCL_TEST_SCRATCH=str(scratch), PYTHONPATH=str(ROOT), **{planted.MAY_PLANT: "1"}
        ),
        timeout=500,
    )
    ledger_command(["export", "--ledger", ledger, "--output", str(top / "ledger" / "ledger.jsonl")])
    places = [*unpacked("<stdout>", ended.stdout), *unpacked("<stderr>", ended.stderr)]
    places += files(top / "storage", top / "ledger", home, scratch)
    assert len(places) > 50
    said = (ended.stdout + ended.stderr).decode()
    return Searched(ended.returncode, said, search(CANARIES, places))


@pytest.fixture(scope="module")
def short_folders() -> Iterator[Callable[[], Path]]:
    """Makes folders whose path is short enough for Ray's sockets."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="dpgcl-", dir="/tmp")))
        return made[-1]

    yield make
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory, short_folders: Callable[[], Path]) -> Searched:
    return searched_sweep(tmp_path_factory.mktemp("private"), short_folders(), "private")


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory, short_folders: Callable[[], Path]) -> Searched:
    return searched_sweep(tmp_path_factory.mktemp("public"), short_folders(), "public")


@pytest.mark.ray
@pytest.mark.long
def test_sweep_on_public_data_is_found_leaking(public: Searched) -> None:
    expected = {*planted.METRICS, "pixels", "words"}
    assert set(public.found) >= expected, (expected - set(public.found), public.said)


@pytest.mark.ray
@pytest.mark.long
def test_search_looks_where_public_metrics_go(public: Searched) -> None:
    wanted = {"<stdout>", "mlflow.db", "checkpoint.pt", "S4-Na1-private-r0.json"}
    assert public.kinds() >= wanted, public.found


@pytest.mark.ray
@pytest.mark.long
def test_sweep_on_private_data_leaves_no_secret(private: Searched) -> None:
    assert private.found == {}, private.said


@pytest.mark.ray
@pytest.mark.long
def test_sweep_on_private_data_trains_and_tells_of_failures(private: Searched) -> None:
    assert private.code == 1
    assert "[1/4] S4-Na1-private-r0: knn_accuracy" in private.said
    for seed, kind in enumerate(("RuntimeError", "an error", "SystemExit"), start=1):
        assert f"failed: S4-Na1-private-r{seed} ({kind} (its message is withheld" in private.said
