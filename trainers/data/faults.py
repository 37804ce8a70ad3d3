"""The error for records that cannot be used, and the size check that every kind of image data needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dpgcl_core.errors import DataError


class RecordsError(DataError):
    """Some records cannot be used; the message states the rule and, after ";", how many break it, not which.

    Attributes:
      details: counts and positions for each fault; as private as the records, so not for logs.
    """

    def __init__(self, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = details or {}


def check_one_size(sizes: Counter[tuple[int, int]]) -> None:
    """Raise RecordsError if images differ in size; `sizes` counts them by (height, width)."""
    if len(sizes) > 1:
        raise RecordsError(
            f"all images must have the same size; {sizes.total()} images have {len(sizes)} different sizes. "
            "Pass --image-size to resize them to a square",
            {"num_images_by_height_and_width": dict(sizes)},
        )
