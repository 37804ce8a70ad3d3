"""Published files: finding and downloading them (from 127.0.0.1), and reading the built-in data sets.

The archives are small ones in the publishers' formats, with their checksums entered as the published ones.
"""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pooch
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError, DataError
from trainers.data import builtin_datasets, download
from trainers.data.dataset import Dataset
from trainers.data.download import RemoteFile, cache_folder, find_file, find_or_download
from trainers.data.faults import RecordsError
from trainers.data.loading import load_dataset
from trainers.data.records import Records

USERS_DATA = os.environ.get("DPGCL_DATA")

CONTENT = bytes(range(256)) * 10_000
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path: /whole/, /short/ (cut off), /wrong/, /stall/, /packed/ and a name; else 404."""

    def do_GET(self):
        kind = self.path.split("/")[1]
        self.server.asked.append(self.path)
        if kind == "packed":
            self.send_packed()
            return
        if kind not in ("whole", "short", "wrong", "stall"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if kind == "stall":
            self.wfile.write(CONTENT[:1000])
            self.server.release.wait(20)
            return
        self.wfile.write({"short": CONTENT[:-1], "wrong": CONTENT[::-1]}.get(kind, CONTENT))

    def send_packed(self):
        """As a server does that packs whatever a client can unpack, and packed files not again."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.answer)))
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.asked, running.release = [], threading.Event()
        running.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.release.set()
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    for name in ("DPGCL_DATA", "DPGCL_MIRROR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("DPGCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def remote(*urls: str, checksum: str = MD5) -> RemoteFile:
    return RemoteFile(name="set.bin", urls=urls, checksum=checksum)


def stored(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("checksum", [MD5, SHA256])
@pytest.mark.server
def test_download_stores_the_file_in_the_cache(checksum, server, cache):
    path = find_or_download(remote(f"{server.url}/whole/set.bin", checksum=checksum), "some-set")
    assert path == cache / "some-set" / "set.bin"
    assert path.read_bytes() == CONTENT
    assert stored(cache) == ["some-set/set.bin"]


@pytest.mark.server
def test_download_happens_once(server):
    file = remote(f"{server.url}/whole/set.bin")
    assert find_or_download(file, "s") == find_or_download(file, "s")
    assert len(server.asked) == 1


@pytest.mark.server
def test_download_replaces_a_damaged_cached_file(server, cache):
    (cache / "s").mkdir(parents=True)
    (cache / "s" / "set.bin").write_bytes(CONTENT[:-5])
    assert find_or_download(remote(f"{server.url}/whole/set.bin"), "s").read_bytes() == CONTENT


@pytest.mark.server
def test_download_falls_back_to_the_next_address(server):
    file = remote(f"{server.url}/none/set.bin", f"{server.url}/wrong/set.bin", f"{server.url}/whole/set.bin")
    assert find_or_download(file, "s").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("short", r"IncompleteRead\(2559999 bytes read, 1 more expected\)"),
        ("wrong", "does not match the known hash"),
        ("none", "404 Client Error"),
        ("stall", "timed out"),
    ],
)
@pytest.mark.server
def test_failed_download_leaves_nothing(kind, reason, server, cache, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.3)
    with pytest.raises(DataError, match=reason):
        find_or_download(remote(f"{server.url}/{kind}/set.bin"), "s")
    assert stored(cache) == []


@pytest.mark.server
def test_failed_download_keeps_what_the_cache_had(server, cache):
    (cache / "s").mkdir(parents=True)
    (cache / "s" / "set.bin").write_bytes(b"older")
    with pytest.raises(DataError, match="could not be downloaded: "):
        find_or_download(remote(f"{server.url}/short/set.bin"), "s")
    assert (cache / "s" / "set.bin").read_bytes() == b"older"


@pytest.mark.server
def test_interrupted_download_leaves_nothing(server, cache, monkeypatch):
    seen = []

    def interrupt(*_):
        seen.extend(stored(cache))
        raise KeyboardInterrupt

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        find_or_download(remote(f"{server.url}/whole/set.bin"), "s")
    assert len(seen) == 1, "the download was under way"
    assert stored(cache) == []


def test_no_answer_names_the_address_and_the_place_to_put_the_file(monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 2.0)
    with pytest.raises(DataError) as caught:
        find_or_download(remote("http://127.0.0.1:9/set.bin"), "some-set")
    assert "http://127.0.0.1:9/set.bin" in str(caught.value)
    assert "$DPGCL_DATA/some-set/set.bin" in str(caught.value)


@pytest.mark.server
def test_download_says_nothing_and_unpacks_nothing(server, capfd):
    """A server may call an archive an encoding: the published checksum is that of the archive."""
    packed = gzip.compress(CONTENT)
    server.answer = packed
    checksum = f"md5:{hashlib.md5(packed).hexdigest()}"
    path = find_or_download(remote(f"{server.url}/packed/set.bin", checksum=checksum), "s")
    assert path.read_bytes() == packed
    assert capfd.readouterr() == ("", "")


@pytest.mark.server
def test_stalled_server_is_given_up_after_the_timeout(server, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.3)
    begin = time.monotonic()
    with pytest.raises(DataError, match="timed out"):
        find_or_download(remote(f"{server.url}/stall/set.bin"), "s")
    assert time.monotonic() - begin < 10


@pytest.mark.server
def test_simultaneous_downloads_all_succeed(server, cache):
    file = remote(f"{server.url}/whole/set.bin")
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: find_or_download(file, "s"), range(8)))
    assert {path.read_bytes() == CONTENT for path in paths} == {True}
    assert stored(cache) == ["s/set.bin"]


@pytest.mark.server
def test_mirror_replaces_everything_but_the_name(server, monkeypatch):
    monkeypatch.setenv("DPGCL_MIRROR", f"{server.url}/whole/deep/")
    find_or_download(remote("http://127.0.0.1:9/elsewhere/set.bin"), "s")
    assert server.asked == ["/whole/deep/set.bin"]


@pytest.mark.server
def test_mirror_is_held_to_the_published_checksum(server, monkeypatch):
    monkeypatch.setenv("DPGCL_MIRROR", f"{server.url}/wrong")
    with pytest.raises(DataError, match="does not match the known hash"):
        find_or_download(remote(f"{server.url}/whole/set.bin"), "s")


@pytest.mark.parametrize("mirror", ["file:///data", "ftp://host", "host/path"])
def test_mirror_that_is_no_http_address_is_refused(mirror, monkeypatch):
    monkeypatch.setenv("DPGCL_MIRROR", mirror)
    with pytest.raises(ConfigError, match="DPGCL_MIRROR must be"):
        find_or_download(remote("http://127.0.0.1:9/set.bin"), "s")


@pytest.mark.parametrize("place", ["some_set", "Some-Set", "someset", "SomeSet/raw", "."])
def test_data_folder_is_searched_first_in_every_spelling(place, tmp_path, monkeypatch):
    kept = tmp_path / "data" / place / "set.bin"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(CONTENT)
    monkeypatch.setenv("DPGCL_DATA", str(tmp_path / "data"))
    assert find_or_download(remote("http://127.0.0.1:9/set.bin"), "some-set") == kept


def test_damaged_file_in_the_data_folder_is_refused_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DPGCL_DATA", str(tmp_path))
    (tmp_path / "set.bin").write_bytes(b"damaged")
    with pytest.raises(DataError, match="published checksum"):
        find_or_download(remote("http://127.0.0.1:9/set.bin"), "s")
    assert (tmp_path / "set.bin").read_bytes() == b"damaged"


def test_data_folder_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DPGCL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="DPGCL_DATA must be an existing folder"):
        find_file("set.bin", "s")


@pytest.mark.server
def test_cache_that_cannot_be_written_is_refused(server, cache):
    cache.write_text("a file, not a folder")
    with pytest.raises(DataError, match="Set DPGCL_CACHE"):
        find_or_download(remote(f"{server.url}/whole/set.bin"), "s")


def test_find_file_looks_in_the_cache_too(cache):
    assert find_file("set.bin", "s") is None
    (cache / "s").mkdir(parents=True)
    (cache / "s" / "set.bin").write_bytes(b"")
    assert find_file("set.bin", "s") == cache / "s" / "set.bin"


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DPGCL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/dpgcl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "dpgcl"


# Built-in data sets, from small archives in the publishers' formats


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """An empty `$DPGCL_DATA`; nothing can leave the machine (port 9 of the loopback is closed)."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("DPGCL_DATA", str(folder))
    monkeypatch.setenv("DPGCL_MIRROR", "http://127.0.0.1:9")
    return folder


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def jpeg(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "JPEG")
    return out.getvalue()


def pairs(records: Records) -> set[tuple[int, bytes]]:
    return {(int(i), image.tobytes()) for i, image in zip(records.ids, records.images, strict=True)}


def publish(monkeypatch, folder: Path, name: str, contents: dict[str, bytes]) -> None:
    """Puts files where they are found and makes their checksums the published ones."""
    folder.mkdir(exist_ok=True)
    files = []
    for file_name, content in contents.items():
        (folder / file_name).write_bytes(content)
        checksum = f"md5:{hashlib.md5(content).hexdigest()}"
        files.append(
            builtin_datasets.RemoteFile(name=file_name, urls=("http://127.0.0.1:9/",), checksum=checksum)
        )
    monkeypatch.setitem(builtin_datasets.FILES, name, tuple(files))


@pytest.mark.skipif(not USERS_DATA, reason="DPGCL_DATA is not set")
def test_fashion_mnist_is_found_in_the_users_data(monkeypatch):
    monkeypatch.setenv("DPGCL_DATA", USERS_DATA)
    loaded = load_dataset("fashion-mnist")
    assert (loaded.image_shape, len(loaded.train), len(loaded.test)) == ((1, 28, 28), 60_000, 10_000)
    assert np.bincount(loaded.train.labels).tolist() == [6_000] * 10


IDX_NAMES = [file.name for file in builtin_datasets.FILES["fashion-mnist"]]


def idx_files() -> tuple[dict[str, bytes], list[np.ndarray]]:
    arrays = [noise(5, 28, 28), np.arange(5, dtype=np.uint8), noise(2, 28, 28), np.arange(2, dtype=np.uint8)]
    packed = [
        gzip.compress(struct.pack(f">4B{a.ndim}I", 0, 0, 8, a.ndim, *a.shape) + a.tobytes()) for a in arrays
    ]
    return dict(zip(IDX_NAMES, packed, strict=True)), arrays


def test_fashion_mnist_is_the_same_from_idx_and_npz(data, monkeypatch):
    files, arrays = idx_files()
    publish(monkeypatch, data / "FashionMNIST", "fashion-mnist", files)
    from_idx = load_dataset("fashion-mnist")
    names = ("train_images", "train_labels", "test_images", "test_labels")
    np.savez(data / "fashion_mnist.npz", **dict(zip(names, arrays, strict=True)))
    (data / "FashionMNIST" / IDX_NAMES[0]).unlink()
    from_npz = load_dataset("fashion-mnist")
    assert pairs(from_idx.train) == pairs(from_npz.train)
    assert (from_idx.test.images[:, 0] == arrays[2]).all()
    assert from_npz.test.labels.tolist() == [0, 1]


def test_fashion_mnist_of_another_shape_is_refused(data):
    np.savez(
        data / "fashion_mnist.npz",
        train_images=noise(3, 4, 4),
        train_labels=[0] * 3,
        test_images=noise(3, 4, 4),
        test_labels=[0] * 3,
    )
    with pytest.raises(DataError, match=r"must be uint8 \[N, 28, 28\]"):
        load_dataset("fashion-mnist")


def test_fashion_mnist_without_an_array_is_refused(data):
    np.savez(data / "fashion_mnist.npz", train_images=noise(3, 4, 4))
    with pytest.raises(DataError, match=r"readable .npz with the arrays"):
        load_dataset("fashion-mnist")


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 and the NumPy of its time wrote: byte strings and the old module names."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, text):
        content = text if isinstance(text, bytes) else text.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    def save_global(self, obj, name=None):
        module = "numpy.core.multiarray" if obj.__name__ == "_reconstruct" else obj.__module__
        self.write(pickle.GLOBAL + f"{module}\n{name or obj.__name__}\n".encode())
        self.memoize(obj)

    dispatch[bytes] = dispatch[str] = save_text
    dispatch[type] = dispatch[type(len)] = save_global


def python2_pickle(value) -> bytes:
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(value)
    return out.getvalue()


def cifar_batches() -> dict[str, bytes]:
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    return {
        f"cifar-10-batches-py/{name}": python2_pickle(
            {
                "batch_label": name,
                "labels": [i, 9],
                "data": noise(2, 3072, seed=i),
                "filenames": ["x.png", "y.png"],
            }
        )
        for i, name in enumerate(names)
    }


def tar_gz(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def load_cifar10(monkeypatch, data: Path, archive: bytes) -> Dataset:
    publish(monkeypatch, data / "CIFAR-10", "cifar10", {"cifar-10-python.tar.gz": archive})
    return load_dataset("cifar10")


def test_cifar10_reads_the_published_format(data, monkeypatch):
    loaded = load_cifar10(
        monkeypatch, data, tar_gz({"cifar-10-batches-py/readme.html": b""} | cifar_batches())
    )
    assert (loaded.train.images[2:4] == noise(2, 3072, seed=1).reshape(2, 3, 32, 32)).all()
    assert loaded.train.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert loaded.test.labels.tolist() == [5, 9]


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 5])
def test_cifar10_with_a_malicious_pickle_is_refused_and_nothing_runs(protocol, data, tmp_path, monkeypatch):
    bad = {"cifar-10-batches-py/data_batch_3": pickle.dumps(Malicious(tmp_path / "owned"), protocol)}
    with pytest.raises(pickle.UnpicklingError, match="must hold only arrays"):
        load_cifar10(monkeypatch, data, tar_gz(cifar_batches() | bad))
    assert not (tmp_path / "owned").exists()


def eurosat_zip(**changed: bytes) -> bytes:
    colours = {"Forest/Forest_1": 40, "Forest/Forest_2": 90, "River/River_1": 200}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, value in colours.items():
            image = jpeg(np.full((64, 64, 3), value, np.uint8))
            archive.writestr(f"2750/{name}.jpg", changed.get(name.rpartition("/")[2], image))
    return out.getvalue()


def load_eurosat(monkeypatch, data: Path, archive: bytes, image_size: int | None = None) -> Dataset:
    publish(monkeypatch, data / "eurosat", "eurosat", {"EuroSAT.zip": archive})
    return load_dataset("eurosat", image_size=image_size)


def test_eurosat_is_decoded_to_32_pixels(data, monkeypatch):
    loaded = load_eurosat(monkeypatch, data, eurosat_zip())
    assert (loaded.image_shape, loaded.test) == ((3, 32, 32), None)
    assert loaded.train.images[:, 0, 5, 5].tolist() == [40, 90, 200]
    assert loaded.train.labels.tolist() == [0, 0, 1]


def checkerboard() -> bytes:
    """64 pixels square, black and white alternate in every row and column."""
    fine = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    return jpeg(np.stack([fine] * 3, -1))


def test_eurosat_is_shrunk_by_averaging(data, monkeypatch):
    loaded = load_eurosat(monkeypatch, data, eurosat_zip(Forest_1=checkerboard()))
    assert np.abs(loaded.train.images[0].astype(int) - 127).max() < 10


def test_eurosat_image_size_is_decoded_from_the_full_image(data, monkeypatch):
    archive = eurosat_zip(Forest_1=checkerboard())
    load_eurosat(monkeypatch, data, archive)
    full = load_eurosat(monkeypatch, data, archive, image_size=64).train.images
    assert full.shape == (3, 3, 64, 64)
    assert full[0].std() > 100, "single pixels survive only at full size"


def test_eurosat_ids_do_not_depend_on_image_size(data, monkeypatch):
    small = load_eurosat(monkeypatch, data, eurosat_zip())
    full = load_eurosat(monkeypatch, data, eurosat_zip(), image_size=64)
    assert full.train.ids.tolist() == small.train.ids.tolist()


def test_eurosat_with_a_damaged_image_is_refused_by_number_alone(data, monkeypatch):
    with pytest.raises(RecordsError, match="among 3 images: 1 unreadable"):
        load_eurosat(monkeypatch, data, eurosat_zip(Forest_2=b"x"))


def test_builtin_that_is_not_the_published_one_is_refused(data):
    (data / "EuroSAT.zip").write_bytes(eurosat_zip())
    with pytest.raises(DataError, match=r"must have its published checksum md5:c8fa.*folder:PATH"):
        load_dataset("eurosat")
