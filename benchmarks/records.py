#!/usr/bin/env python
"""Measure own images that stay in their files: memory and start by number of records, and random reads.

    python benchmarks/records.py --folder /data/tmp                          # 10,000 and 1,000,000 records
    python benchmarks/records.py --folder /data/tmp --sizes 1000 20000 --json

Small JPEG files with captions are generated in tar shards. For each number of records, a fresh process that
has imported what a sweep's driver imports reads them and pickles the records, first without an index and then
with one. Another process unpickles them as a worker does, draws a step of 2,048 records and decodes it.
Memory is the peak of what a process owns (RssAnon and RssShmem), without pages of mapped files, which belong
to the machine's cache.

Then images of 224 pixels are read one by one in random order by every side in turn: this store, a plain loop
in the order of the files with the same decoder, torchvision's ImageFolder behind a DataLoader with a random
sampler and, if they are installed, `datasets` and `webdataset`.
"""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from PIL import Image

from benchmarks import harness
from benchmarks.harness import Output, Page, in_turn, ratio_of, with_spread
from dpgcl_core.errors import exit_on_bad_input
from trainers.data.decoding import decode_image
from trainers.data.image_index import INDEX_FOLDER
from trainers.data.loading import load_dataset
from trainers.torchvision_import import ensure_torchvision_import

STEP = 2048
_SHARD, _DISTINCT, _THREADS = 10_000, 64, 2
_COLUMNS = [
    *("records", "process", "seconds", "imports, MB", "peak, MB", "ratio of peaks"),
    *("peak beyond 1.2 times, bytes a record", "index, bytes a record", "sent to workers, bytes a record"),
]


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """The data to generate."""

    folder: Path
    """Folder for the generated data, which are kept."""
    sizes: tuple[int, ...] = (10_000, 1_000_000)
    """Numbers of records."""
    reads: int = 2048
    """Number of images of 224 pixels."""
    rounds: int = 5
    """Number of rounds of random reads."""


def jpegs(num: int, pixels: int) -> list[bytes]:
    """Return `num` different JPEG files: `_DISTINCT` pictures, each with a comment of its own."""
    generator, pictures = np.random.default_rng(0), []
    for _ in range(_DISTINCT):
        out = io.BytesIO()
        coarse = generator.integers(0, 256, (pixels // 4, pixels // 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((pixels, pixels)).save(out, "JPEG", quality=80)
        pictures.append(out.getvalue())
    comments = (b"\xff\xfe\x00\x0a" + number.to_bytes(8, "big") for number in range(num))
    return [p[:2] + c + p[2:] for p, c in zip(pictures * (num // _DISTINCT + 1), comments, strict=False)]


def write_shards(folder: Path, num: int) -> str:
    """Write tar shards of small images with captions, unless they are there, and return their name."""
    if not folder.exists():
        unfinished = folder.with_suffix(".partial")
        unfinished.mkdir(parents=True, exist_ok=True)
        pictures = jpegs(_SHARD, 32)
        for first in range(0, num, _SHARD):
            with tarfile.open(unfinished / f"{first // _SHARD:05d}.tar", "w") as shard:
                for row in range(first, min(first + _SHARD, num)):
                    image = pictures[row - first] + row.to_bytes(8, "big")  # after the image's end mark
                    for kind, content in (("jpg", image), ("txt", f"picture number {row}".encode())):
                        member = tarfile.TarInfo(f"{row:09d}.{kind}")
                        member.size = len(content)
                        shard.addfile(member, io.BytesIO(content))
        unfinished.rename(folder)
    return f"webdataset:{folder}"


def owned_bytes() -> int:
    """Return the memory that this process owns, without pages of mapped files."""
    return harness.memory_status("RssAnon") + harness.memory_status("RssShmem")


def measure(order: dict[str, Any]) -> dict[str, float]:
    """Read the data of an order as a driver, or draw a step from the records of a driver as a worker."""
    import mlflow  # noqa: F401  # imported by a sweep's driver
    import ray  # noqa: F401

    import sweeps.service.planning.sweep_data  # noqa: F401

    before, peak, is_done, message = owned_bytes(), 0, threading.Event(), Path(order["message"])

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.01):
            peak = max(peak, owned_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    if order["name"]:
        records = load_dataset(order["name"], in_memory=False).train
        seconds = time.perf_counter() - start
        message.write_bytes(pickle.dumps(records, protocol=5))  # in place of Ray's object store
    else:
        records = pickle.loads(message.read_bytes())
        records.images[np.random.default_rng(0).integers(0, len(records), STEP)]
        seconds = time.perf_counter() - start
    is_done.set()
    watcher.join()
    return {"before": before, "peak": peak, "seconds": seconds, "message": message.stat().st_size}


def measure_sizes(options: Options) -> list[dict[str, Any]]:
    """Return the measurements by number of records, without and with an index."""
    rows: list[dict[str, Any]] = []
    message = str(options.folder / "records.pickle")
    for num in options.sizes:
        name = write_shards(options.folder / f"shards-{num}", num)
        for role in ("driver, index built", "driver, index read", "worker"):
            order = {"name": "" if role == "worker" else name, "message": message}
            row = harness.result_of_fresh_process(
                "benchmarks.records", order, of=f"the memory of {num} records"
            )
            index = Path(name.partition(":")[2], INDEX_FOLDER).glob("*.arrow")
            size = sum(file.stat().st_size for file in index)
            rows.append(row | {"records": num, "role": role, "index": size})
            harness.print_line(f"{num} records, {role}: {row}")
    return rows


def sides_of_reads(folder: Path, num: int) -> dict[str, Callable[[], object]]:
    """Return the sides that read the same `num` images of 224 pixels, each as a function of one pass."""
    ensure_torchvision_import()
    from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

    images = folder / f"images-{num}"
    if not images.exists():
        (images / "class").mkdir(parents=True)
        for row, content in enumerate(jpegs(num, 224)):
            (images / "class" / f"{row:06d}.jpg").write_bytes(content)
    files = sorted(images.rglob("*.jpg"))
    stored = load_dataset(f"folder:{images}", in_memory=False).train.images
    order = np.random.default_rng(1).permutation(num)

    def plain_loop() -> None:
        for file in files:
            decode_image(file.read_bytes(), None)

    def image_folder() -> None:
        data = ImageFolder(str(images), transform=np.asarray)
        sampler = torch.utils.data.RandomSampler(data)
        loader = torch.utils.data.DataLoader(data, 256, sampler=sampler, num_workers=_THREADS)
        for _ in loader:
            pass

    sides: dict[str, Callable[[], object]] = {
        "this store, random order": lambda: [stored[order[i : i + 256]] for i in range(0, num, 256)],
        "plain loop, order of files": plain_loop,
        "torchvision ImageFolder, random order": image_folder,
    }
    if importlib.util.find_spec("datasets"):
        import datasets  # type: ignore[import-not-found]

        rows = datasets.Dataset.from_dict({"image": list(map(str, files))})
        rows = rows.cast_column("image", datasets.Image())
        sides["datasets, map style, random order"] = lambda: [
            np.asarray(rows[int(i)]["image"]) for i in order
        ]
    if importlib.util.find_spec("webdataset"):
        import webdataset  # type: ignore[import-not-found]

        shard = folder / f"images-{num}.tar"
        if not shard.exists():
            with tarfile.open(shard, "w") as archive:
                for file in files:
                    archive.add(file, file.name)
        sides["webdataset, sequential"] = lambda: list(
            webdataset.WebDataset(str(shard), shardshuffle=False).decode("rgb8")
        )
    return sides


def main() -> int:
    """Run the benchmark."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=_THREADS)
    rows = measure_sizes(options)
    sides = sides_of_reads(options.folder, options.reads)
    timed = {name: partial(harness.seconds_of, read) for name, read in sides.items()}
    seconds = in_turn(timed, options.rounds)
    peaks = {row["role"]: row["peak"] for row in rows if row["records"] == rows[0]["records"]}
    sizes = harness.markdown_table(
        _COLUMNS,
        [
            [
                f"{row['records']:,}", row["role"], f"{row['seconds']:.1f}",
                f"{row['before'] / 1e6:,.0f}", f"{row['peak'] / 1e6:,.0f}",
                f"{row['peak'] / peaks[row['role']]:.2f}",
                f"{(row['peak'] - 1.2 * peaks[row['role']]) / row['records']:,.0f}",
                f"{row['index'] / row['records']:.0f}", f"{row['message'] / row['records']:.0f}",
            ]
            for row in rows
        ],
    )  # fmt: skip
    ours = "this store, random order"
    reads = harness.markdown_table(
        ["side", "images a second", "speed of this store over it"],
        [
            [name, f"{options.reads / np.median(taken):,.0f}", with_spread(r.median, r[1:])]
            for name, taken in seconds.items()
            for r in [ratio_of(taken, seconds[ours])]
        ],
    )
    page = Page(
        name="records", title="Records that stay in their files", text=(__doc__ or "").split("\n\n", 2)[2]
    )
    return harness.publish(page, options, facts, {"sizes": rows, "reads": seconds}, [sizes, reads])


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    else:
        sys.exit(exit_on_bad_input(main))
