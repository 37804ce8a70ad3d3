"""Marks of data in a bucket: in the bucket, and if it cannot be written with the ledger."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dpgcl_core.errors import ConfigError, LedgerError
from dpgcl_core.ledger.__main__ import main
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.marks import MARK, check_unmarked, is_read_only, read_mark
from tests.buckets import Bucket, bucket
from tests.dpgcl_core.ledger.test_marks import CAP, PLAN

__all__ = ["bucket"]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return new_ledger(tmp_path / "ledger.db")


def new_ledger(file: Path) -> Ledger:
    created = Ledger.create(str(file))
    created.register("scans", CAP, num_records_public=10_000)
    return created


def put_shards(bucket: Bucket, folder: str = "a/d", num: int = 4) -> Path:
    """Put shards, and return the folder's path as options hold it."""
    for shard in range(num):
        bucket.put(f"{folder}/train-{shard:03d}.tar", b"records %d" % shard)
    return Path(f"{bucket.address}/{folder}")


WAYS = {
    "the folder": ("a/d", "a/d"),
    "its ranges": ("a/d/train-{000..003}.tar", "a/d/train-{000..003}.tar"),
    "a folder above": ("a", "a/d"),
    "the bucket": ("", "a/d"),
    "a shard in the folder": ("a/d", "a/d/train-002.tar"),
    "ranges in the folder": ("a/d", "a/d/train-{001..002}.tar"),
    "the folder of ranges": ("a/d/train-{000..001}.tar", "a/d"),
    "the folder above ranges": ("a/d/train-{000..001}.tar", "a"),
    "other ranges": ("a/d/train-{000..002}.tar", "a/d/train-{002..003}.tar"),
    "a shard of ranges": ("a/d/train-{000..002}.tar", "a/d/train-001.tar"),
    "ranges with a shard": ("a/d/train-001.tar", "a/d/train-{000..002}.tar"),
    "a folder of ranges of folders": ("{a..}/{0..1}/x-{0..1}.tar", "{a..}/0"),
    "ranges of folders with a folder": ("{a..}/1", "{a..}/{0..1}/x-{0..1}.tar"),
    "a shard of ranges of folders": ("{a..}/{0..1}/x-{0..1}.tar", "{a..}/1/x-0.tar"),
    "a shard in a folder with an object's name": ("b", "b/x-0.tar"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_mark_is_found_on_every_way_to_the_data(
    bucket: Bucket, ledger: Ledger, tmp_path: Path, way: str
) -> None:
    put_shards(bucket)
    for key in ("{a..}/0/x-0.tar", "{a..}/1/x-0.tar", "b", "b/x-0.tar"):
        bucket.put(key, b"records")
    marked, used = (Path(f"{bucket.address}/{name}") for name in WAYS[way])
    assert read_mark(used) is None
    ledger.bind("scans", marked)
    assert read_mark(used) == ("scans", ledger.head())
    with pytest.raises(LedgerError, match="are private, charged as data set 'scans'"):
        check_unmarked(used)
    with pytest.raises(LedgerError, match="names ledger"):
        new_ledger(tmp_path / "second.db").bind("scans", used)
    ledger.register("others", CAP, num_records_public=10_000)
    with pytest.raises(LedgerError, match="charged as data set 'scans', not as 'others'"):
        ledger.bind("others", used)


@pytest.mark.parametrize("marked", ["a/d/train-{000..001}.tar", "a/d/train-000.tar", "a/c"])
def test_other_data_beside_marked_ones_have_no_mark(bucket: Bucket, ledger: Ledger, marked: str) -> None:
    put_shards(bucket)
    put_shards(bucket, "a/c")
    ledger.bind("scans", Path(f"{bucket.address}/{marked}"))
    check_unmarked(Path(f"{bucket.address}/a/d/train-{{002..003}}.tar"))
    check_unmarked(Path(f"{bucket.address}/a/dd"))


def test_a_mark_follows_the_ledger_and_an_old_copy_is_refused(
    bucket: Bucket, ledger: Ledger, tmp_path: Path
) -> None:
    data = put_shards(bucket)
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    ledger.bind("scans", data)
    ledger.reserve("scans", PLAN)
    assert read_mark(data) == ("scans", ledger.head())
    assert [key for key in bucket.list_keys() if not key.endswith(".tar")] == [f"a/d/{MARK}"]
    with pytest.raises(LedgerError, match="old copy"):
        Ledger.open(str(tmp_path / "copy.db")).bind("scans", data)


def test_two_ledgers_that_begin_at_once_cannot_both_mark(
    bucket: Bucket, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, second = put_shards(bucket), new_ledger(tmp_path / "second.db")
    ledger.bind("scans", data)
    # The second ledger looked before the first one wrote.
    monkeypatch.setattr(Ledger, "check_marks", lambda self, dataset_id, path: ())
    with pytest.raises(LedgerError, match="names ledger"):
        second.bind("scans", data)
    assert read_mark(data) == ("scans", ledger.head())


def test_a_mark_that_another_writer_moved_is_read_again(
    bucket: Bucket, ledger: Ledger, tmp_path: Path
) -> None:
    data = put_shards(bucket)
    ledger.bind("scans", data)
    other, refused = Ledger.open(str(tmp_path / "ledger.db")), []

    def answer(method: str, path: str) -> str | None:
        if method == "PUT" and not refused:
            refused.append(path)
            return "412 Precondition Failed"
        return None

    bucket.requests.answer = answer
    other.bind("scans", data)
    other.reserve("scans", PLAN)
    assert refused
    assert read_mark(data) == ("scans", other.head())


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"{}"])
def test_a_damaged_mark_is_refused(
    bucket: Bucket, ledger: Ledger, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = put_shards(bucket)
    bucket.put(f"a/d/{MARK}", content)
    for _ in range(2):
        with pytest.raises(LedgerError, match="cannot be read"):
            ledger.bind("scans", data)
        monkeypatch.setattr(Ledger, "check_marks", lambda self, dataset_id, path: ())  # damaged meanwhile


def test_a_mark_whose_answer_was_lost_is_new(
    bucket: Bucket, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, checks = put_shards(bucket), list[Path]()
    answers = iter([None, None, None, "500 Internal Server Error"])  # three writes try the folder
    bucket.requests.lost = lambda method, path: next(answers, None) if method == "PUT" else None
    monkeypatch.setattr(Ledger, "check_marks", lambda self, dataset_id, path: checks.append(path) or ())
    ledger.bind("scans", data)
    assert read_mark(data) == ("scans", ledger.head())
    assert checks == [data, data], "marks of others are searched again after the write"


@pytest.mark.parametrize("status", ["503 Slow Down", "405 Method Not Allowed", "404 Not Found"])
def test_a_failure_is_not_taken_for_a_folder_that_cannot_be_written(
    bucket: Bucket, ledger: Ledger, tmp_path: Path, status: str
) -> None:
    data = put_shards(bucket)
    bucket.requests.answer = lambda method, path: status if method == "PUT" else None
    with pytest.raises(LedgerError, match="marks in a bucket") as caught:
        ledger.bind("scans", data)
    assert "http://" not in str(caught.value)
    assert not list(tmp_path.rglob(f"*{MARK}"))


def test_a_bucket_that_does_not_answer_is_refused(bucket: Bucket, ledger: Ledger) -> None:
    data = put_shards(bucket)
    bucket.requests.answer = lambda method, path: "403 Forbidden"
    for use in (lambda: read_mark(data), lambda: ledger.check_marks("scans", data)):
        with pytest.raises(LedgerError, match="marks in a bucket must be readable"):
            use()


def test_a_mark_that_cannot_be_written_stops_the_charge(bucket: Bucket, ledger: Ledger) -> None:
    data = put_shards(bucket)
    ledger.bind("scans", data)
    bucket.requests.answer = lambda method, path: "403 Forbidden" if method == "PUT" else None
    with pytest.raises(LedgerError):
        ledger.reserve("scans", PLAN)


def test_data_that_cannot_be_marked_are_marked_with_the_ledger(bucket: Bucket, ledger: Ledger) -> None:
    data, renamed = put_shards(bucket), put_shards(bucket, "b/copy")  # the same objects
    other = put_shards(bucket, "c", num=2)
    bucket.requests.answer = lambda method, path: "403 Forbidden" if method == "PUT" else None
    assert is_read_only(data)
    ledger.bind("scans", data)
    assert all(key.endswith(".tar") for key in bucket.list_keys())
    assert ledger.owner_of(data) == "scans"
    ledger.register("others", CAP, num_records_public=10_000)
    for path in (data, renamed):
        with pytest.raises(LedgerError, match="charged as data set 'scans', not as 'others'"):
            ledger.bind("others", path)
    ledger.bind("others", other)


def test_a_mark_holds_no_more_than_in_a_folder(bucket: Bucket, ledger: Ledger, tmp_path: Path) -> None:
    local = tmp_path / "scans.tar"
    local.write_bytes(b"records")
    ledger.bind("scans", local)
    ledger.bind("scans", put_shards(bucket))
    assert (
        json.loads(bucket.get(f"a/d/{MARK}")).keys()
        == json.loads((tmp_path / f"scans.tar{MARK}").read_text()).keys()
    )


def test_commands_take_the_address_of_a_bucket(bucket: Bucket, ledger: Ledger, tmp_path: Path) -> None:
    ledger.bind("scans", put_shards(bucket))
    options = ["--ledger", str(tmp_path / "ledger.db"), "--data"]
    assert main(["verify", *options, f"{bucket.address}/a/d"]) == 0
    with pytest.raises(ConfigError, match="has every named row"):
        main(["restored", "--dataset", "scans", *options, f"{bucket.address}/a/d"])
    with pytest.raises(ConfigError, match="--data must be a path on this machine"):
        main(["verify", *options, "gs://team/scans"])
