"""The names that a sweep and its trials may have."""

from __future__ import annotations

import re


def fit_for_name(text: str) -> str:
    """Return `text` with replacements for the characters that a sweep's name must not contain.

    >>> fit_for_name("npz-my photos (1)")
    'npz-my-photos-1-'
    """
    return re.sub(r"[^\w.+=-]+", "-", text)[:60]
