"""Keeps freed memory in a training's process for the next step.

Every pass allocates the same tensors again. By default, the C library returns large tensors to the operating
system whenever they are freed, and gets their memory back page by page, with each page cleared first. On a
CPU that took a fifth of the time of a private step, whose per-group gradients are such tensors.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""

_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

_MAX_TENSOR_BYTES, _MAX_KEPT_BYTES = 2**25, 2**28


def keep_freed_memory() -> bool:
    """Set the C library to keep the memory that this process frees; return whether it was set.

    It keeps up to 256 MiB at a time, in tensors of up to 32 MiB: larger tensors would leave gaps, for which
    large networks have no memory to spare. Only glibc has this setting. It changes no result; the peak grows
    by the memory that is kept. If the user has set one of glibc's own variables for it, such as
    `MALLOC_TRIM_THRESHOLD_`, or a `glibc.malloc` tunable, that setting stays.
    """
    set_by_user = any(os.environ.get(name) for name in _USER_VARIABLES)
    set_by_user |= "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if set_by_user or not sys.platform.startswith("linux"):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(set_option(_MMAP_THRESHOLD, _MAX_TENSOR_BYTES)) and bool(
        set_option(_TRIM_THRESHOLD, _MAX_KEPT_BYTES)
    )
