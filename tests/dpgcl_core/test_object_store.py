"""Objects in a bucket: ranges, requests, changes, failures, and writes on conditions."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.errors import DataError, DpgclError, ExtraMissing
from dpgcl_core.object_store import (
    REQUESTS_IN_FLIGHT,
    RemoteFile,
    address_of,
    can_write,
    download,
    find_object,
    list_objects,
    read_object,
    read_ranges,
    write_object,
)
from tests.buckets import Bucket, bucket

__all__ = ["bucket"]
CONTENT = bytes(range(256)) * 4096


def file_in(bucket: Bucket, key: str = "shard.tar", content: bytes = CONTENT) -> RemoteFile:
    bucket.put(key, content)
    file = find_object(f"{bucket.address}/{key}")
    assert file is not None
    bucket.requests.clear()
    return file


def test_ranges_are_those_of_the_object_in_any_order(bucket: Bucket) -> None:
    file, other = file_in(bucket), file_in(bucket, "other", CONTENT[::-1])
    places = [(file, 70_000, 30), (other, 5, 1000), (file, 0, 10), (file, 10, 20), (other, 5, 3)]
    whole = {file: CONTENT, other: CONTENT[::-1]}
    assert read_ranges(places) == [whole[f][start : start + size] for f, start, size in places]
    assert read_ranges([]) == []


def test_neighbours_take_one_request_and_no_other_bytes(bucket: Bucket) -> None:
    file = file_in(bucket)
    read_ranges([(file, 1000 * row, 1000) for row in (7, 5, 6, 100, 8)])
    assert sorted(line[2] for line in bucket.requests.reading()) == ["bytes=100000-100999", "bytes=5000-8999"]


def test_ranges_that_overlap_are_read_once(bucket: Bucket) -> None:
    file = file_in(bucket)
    places = [(file, 100, 50), (file, 100, 50), (file, 90, 200), (file, 120, 10)]
    assert read_ranges(places) == [CONTENT[start : start + size] for _, start, size in places]
    assert [line[2] for line in bucket.requests.reading()] == ["bytes=90-289"]


def test_requests_in_flight_are_limited(bucket: Bucket) -> None:
    file = file_in(bucket)
    bucket.requests.delay_seconds = 0.02
    with ThreadPoolExecutor(2) as threads:  # two callers share the limit
        list(threads.map(lambda _: read_ranges([(file, 10_000 * row, 9) for row in range(60)]), range(2)))
    assert 4 < bucket.requests.most_in_flight <= REQUESTS_IN_FLIGHT


@pytest.mark.parametrize("change", ["other", "gone", "shorter"])
def test_a_changed_object_gives_nothing(bucket: Bucket, change: str) -> None:
    file, sound = file_in(bucket), file_in(bucket, "sound")
    if change == "gone":
        bucket.delete("shard.tar")
    else:
        bucket.put("shard.tar", CONTENT[:100] if change == "shorter" else CONTENT[::-1])
    assert read_ranges([(file, 50, 10), (sound, 50, 10), (file, 90_000, 1)]) == [None, CONTENT[50:60], None]


def test_throttled_requests_are_repeated(bucket: Bucket) -> None:
    file = file_in(bucket)
    statuses = iter(["503 Slow Down", "503 Slow Down", "429 Too Many Requests"])
    bucket.requests.answer = lambda method, path: next(statuses, None)
    assert read_ranges([(file, 3, 4)]) == [CONTENT[3:7]]
    assert len(bucket.requests.lines) == 4


@pytest.mark.parametrize("status", ["403 Forbidden", "401 Unauthorized", "400 Bad Request"])
def test_a_refusal_is_told_without_keys(bucket: Bucket, status: str) -> None:
    file = file_in(bucket)
    bucket.requests.answer = lambda method, path: status
    for read in (lambda: read_ranges([(file, 3, 4)]), lambda: list_objects(bucket.address)):
        with pytest.raises(DataError, match=rf"{bucket.address}.* must be readable.*credentials") as caught:
            read()
        assert "hidden-key" not in str(caught.value)
        assert "reader" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_download_is_the_object(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpgcl_core.object_store._LARGEST_RUN", 3000)
    file = file_in(bucket)
    with download(file) as copy:
        assert copy.read() == CONTENT
    with download(file_in(bucket, "empty", b"")) as copy:
        assert copy.read() == b""
    bucket.put("shard.tar", b"other")
    with pytest.raises(DataError, match="must not change"):
        download(file)


def test_objects_are_listed_in_order(bucket: Bucket) -> None:
    for key in ("d/b", "d/a", "d/e/c", "dd/x", "d"):
        bucket.put(key, b"x")
    below, beside = (list_objects(f"{bucket.address}/d", below=below) for below in (True, False))
    assert [file.address.removeprefix(bucket.address) for file in below] == ["/d/a", "/d/b", "/d/e/c"]
    assert [file.address.removeprefix(bucket.address) for file in beside] == ["/d/a", "/d/b"]
    assert len(list_objects(bucket.address)) == 5


def test_only_one_of_two_writers_succeeds(bucket: Bucket) -> None:
    address = f"{bucket.address}/mark"
    assert read_object(address) is None
    assert write_object(address, b"1", tag=None)
    assert not write_object(address, b"2", tag=None)
    content, tag = read_object(address) or (b"", "")
    assert content == b"1"
    assert write_object(address, b"3", tag=tag)
    assert not write_object(address, b"4", tag=tag)
    assert bucket.get("mark") == b"3"


@pytest.mark.parametrize("ignored", ["HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"])
def test_a_service_that_ignores_conditions_is_refused(
    bucket: Bucket, ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = type(bucket.requests).serve

    def ignore(self: Any, application: Any, environ: dict[str, Any], start: Any) -> Any:
        return serve(self, application, {k: v for k, v in environ.items() if k != ignored}, start)

    monkeypatch.setattr(type(bucket.requests), "serve", ignore)
    with pytest.raises(DataError, match="must honour If-Match and If-None-Match"):
        can_write(f"{bucket.address}/a")
    assert bucket.list_keys() == []


def test_a_folder_whose_objects_cannot_be_removed_can_be_written(bucket: Bucket) -> None:
    bucket.requests.answer = lambda method, path: None if method == "PUT" else "403 Forbidden"
    assert can_write(f"{bucket.address}/a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL", "localhost:9000"),
        ("AWS_SECRET_ACCESS_KEY", None),
        ("AWS_PROFILE", "none"),
        ("AWS_PROFILE", "broken"),
    ],
)
def test_wrong_settings_are_told(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str | None
) -> None:
    if name == "AWS_PROFILE":
        (tmp_path / "config").write_text("[profile broken]\ncredential_process = false\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    with pytest.raises(DpgclError, match="must be") as caught:
        list_objects(bucket.address)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_missing_package_is_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for use in (list_objects, find_object, read_object, can_write):
        with pytest.raises(ExtraMissing, match=r"dpgcl\[s3\]"):
            use(bucket.address)


@pytest.mark.parametrize(
    "name", ["..", ".", "%74eam", "team?x", "team#x", "te\nam", "me:secret@team", "team\\x"]
)
def test_a_bucket_has_one_name(name: str) -> None:
    assert address_of(f"s3://{name}/scans") is None


def test_writing_is_tried_and_leaves_nothing(bucket: Bucket) -> None:
    assert can_write(f"{bucket.address}/a")
    assert bucket.list_keys() == []
    bucket.requests.answer = lambda method, path: "403 Forbidden" if method == "PUT" else None
    assert not can_write(f"{bucket.address}/b")
