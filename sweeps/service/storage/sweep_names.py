"""What a sweep and its trials may be named."""

from __future__ import annotations

import re


def fit_for_name(text: str) -> str:
    """Return `text` with what a sweep's name must not hold replaced.

    >>> fit_for_name("npz-my photos (1)")
    'npz-my-photos-1-'
    """
    return re.sub(r"[^\w.+=-]+", "-", text)[:60]
