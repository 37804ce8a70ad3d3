"""Copies at an address: whole, once, of one owner, and refused in one line where they cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dpgcl_core.errors import ConfigError, StorageError
from trainers.files.destination import MANIFEST, Copies, Destination, files_below


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Destination]:
    """An empty folder at an address."""
    yield Destination.open(
        f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/to"
    )
    MemoryFileSystem.store.clear()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are written, in order."""
    names, write = list[str](), Destination.write
    monkeypatch.setattr(
        Destination, "write", lambda self, name, content: names.append(name) or write(self, name, content)
    )
    return names


@pytest.mark.parametrize(
    "address", ["/data/copies", "s3:/bucket/x", "s3://", "simplecache::s3://b/x", "copies"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be one as s3://bucket/folder or file:///folder; got"):
        Destination.open(address)


@pytest.mark.parametrize("address", ["s3://AKIA1:hush@bucket/x", "s3://b/x?secret=hush", "abfs://hush@acc/x"])
def test_credentials_in_an_address_are_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(ConfigError, match=r"no credentials.*\$AWS_ACCESS_KEY_ID") as refused:
        Destination.open(address)
    assert "hush" not in str(refused.value)


def test_unknown_kind_of_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="of a kind that fsspec knows, such as s3"):
        Destination.open("s4://bucket/x")


def test_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(
        ConfigError, match=r"^the address s3://bucket/x needs a package: pip install 'dpgcl\[s3\]'$"
    ):
        Destination.open("s3://bucket/x")


def test_check_leaves_nothing_behind(place: Destination) -> None:
    place.check()
    assert place.sizes() == {}


def test_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"^file://.*/file/x failed while writing .writable-\w+: .*$"):
        Destination.open(f"file://{tmp_path}/file/x").check()


def test_copies_are_whole_and_listed_in_the_manifest(place: Destination, tmp_path: Path) -> None:
    (tmp_path / "figure.png").write_bytes(b"drawn")
    copies = Copies(place, "one")
    copies.put("trials/a.json", b"{}")
    copies.put("figure.png", tmp_path / "figure.png")
    copies.write_manifest()
    assert (place.read("trials/a.json"), place.read("figure.png")) == (b"{}", b"drawn")
    assert set(place.sizes()) == {"trials/a.json", "figure.png", MANIFEST}
    assert Copies(place, "one").names == ["figure.png", "trials/a.json"]


def test_same_content_is_copied_once(place: Destination, written: list[str]) -> None:
    for _ in range(2):
        copies = Copies(place, "one")
        copies.put("a", b"same")
        copies.put("a", b"same")
        copies.write_manifest()
    assert written == ["a", MANIFEST]


def test_content_that_changed_is_copied_again(place: Destination) -> None:
    for content in (b"old", b"new"):
        copies = Copies(place, "one")
        copies.put("a", content)
        copies.write_manifest()
    assert place.read("a") == b"new"


def test_copy_that_was_lost_or_cut_short_is_made_again(place: Destination) -> None:
    first = Copies(place, "one")
    for name in "ab":
        first.put(name, b"content")
    first.write_manifest()
    place.remove("a")
    place.write("b", b"con")
    again = Copies(place, "one")
    for name in "ab":
        again.put(name, b"content")
    assert place.read("a") == place.read("b") == b"content"


def test_copies_after_a_kill_are_completed(place: Destination) -> None:
    """Without a manifest what lies there is nobody's, and is written again."""
    Copies(place, "one").put("a", b"half")
    again = Copies(place, "one")
    again.put("a", b"whole")
    again.write_manifest()
    assert place.read("a") == b"whole"


@pytest.mark.parametrize("manifest", [None, b"{", b"[]", b'{"owner": "other", "files": {}}'])
def test_what_belongs_to_another_is_never_replaced(place: Destination, manifest: bytes | None) -> None:
    Copies(place, "other").write_manifest()
    if manifest is not None:
        place.write(MANIFEST, manifest)
    with pytest.raises(StorageError, match="something else of the same name: give another --name"):
        Copies(place, "one")


def test_files_of_a_folder_are_named_by_their_place_in_it(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    for name in ("model.json", "adapter/a.safetensors", ".hidden", "adapter/.part"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("/etc/hostname")
    assert list(files_below(tmp_path)) == ["adapter/a.safetensors", "model.json"]
