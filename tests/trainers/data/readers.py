"""The readers of pairs by path and options, as the tests call them."""

from __future__ import annotations

from pathlib import Path

from trainers.data import pair_tables, webdataset
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.pair_options import PairOptions
from trainers.data.pairs import LoadedData
from trainers.data.request import Request


def _request(
    path: Path, options: PairOptions | None, image_size: int | None, in_memory: bool | None = None
) -> Request:
    return Request(
        name=f"own:{path}",
        image_size=image_size,
        unit_column=None,
        pairs=options or PairOptions(),
        has_captions=True,
        max_image_pixels=MAX_IMAGE_PIXELS,
        in_memory=in_memory,
    )


def load_csv_pairs(
    path: Path, options: PairOptions | None = None, image_size: int | None = None
) -> LoadedData:
    return pair_tables.load_csv(_request(path, options, image_size))


def load_parquet_pairs(
    path: Path, options: PairOptions | None = None, image_size: int | None = None
) -> LoadedData:
    return pair_tables.load_parquet_pairs(_request(path, options, image_size))


def load_webdataset(
    path: Path, *, unit_field: str | None = None, skip_corrupt: bool = False, image_size: int | None = None
) -> LoadedData:
    options = PairOptions(unit=unit_field, skip_corrupt=skip_corrupt)
    return webdataset.load_webdataset(_request(path, options, image_size, in_memory=False))
