"""What the image decoder says by itself, on stderr, and that it says nothing."""

from __future__ import annotations

import logging
import re
import warnings

_DECODERS = ("ignore", None, Warning, re.compile(r"PIL(\.|$)"), 0)


def silence_decoders() -> None:
    """Drops what Pillow says about single images from here on, which could be of a private one.

    It warns of how many pixels one has, and of how its colours are stored. `warnings.catch_warnings` would
    change the filters of all threads and put them back while others decode: the filter is set and stays.
    """
    if _DECODERS not in warnings.filters[:1]:
        warnings.filterwarnings("ignore", module=_DECODERS[3].pattern)
    logging.getLogger("PIL").setLevel(logging.CRITICAL + 1)
