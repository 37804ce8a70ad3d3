"""The precision of a clipped sum's passes, chosen by the engine whatever the caller has set for the process.

A process can be set to compute float32 products in bfloat16 or TensorFloat32
(`torch.set_float32_matmul_precision`, `torch.backends`), and a caller may be under autocast. Which settings
have an effect depends on the processor. So every gradient rule enters `full_precision` before its forward
pass and leaves it after the sum. Norms are computed from the tensors that are summed, at the accuracy that
the margin of `dpgcl_core.clipping.clipper` needs, and every processor runs the same passes. A network that is
meant to run in low precision has its own autocast around its forward pass. It checks `is_low_precision_off`
first, because the self-check compares ways in float32. Such an inner autocast
casts weights once and keeps the casts until the outermost autocast ends, here `full_precision`. So every pass
begins with `torch.clear_autocast_cache`. Otherwise it could run on casts of weights that no longer exist:
weights that a self-check had perturbed, or copies for another group (`dpgcl_core.clipping.isolation`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_HIGHEST, _EXACT, _INHERITED = "highest", "ieee", "none"


_SETTINGS_LOCK = threading.RLock()
"""The settings belong to the process. A second thread waits, so that it does not restore them during the
first thread's pass."""

_LOW_PRECISION_OFF = ContextVar("low_precision_off", default=False)


@contextmanager
def low_precision_off() -> Iterator[None]:
    """Let networks with their own autocast run in float32, so that two computations can be compared."""
    token = _LOW_PRECISION_OFF.set(True)
    try:
        yield
    finally:
        _LOW_PRECISION_OFF.reset(token)


def is_low_precision_off() -> bool:
    """Return whether a network must not use its own autocast."""
    return _LOW_PRECISION_OFF.get()


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Compute products of float32 tensors in float32: no autocast, no TF32, no bfloat16; restored on exit.

    Settings other than autocast apply to the whole process, as in PyTorch.

    Args:
      device: type of the device that the passes run on, such as "cuda".

    >>> with full_precision("cpu"):
    ...     torch.get_float32_matmul_precision()
    'highest'
    """
    with _SETTINGS_LOCK, _settings_owned(device):
        yield


@contextmanager
def _settings_owned(device: str) -> Iterator[None]:
    """Set the process to full precision; on exit, restore the caller's settings."""
    settings = _settings()
    before = [setting.fp32_precision for setting in settings]
    matmul_before = _matmul_precision()
    torch.set_float32_matmul_precision(_HIGHEST)
    for setting in settings:
        setting.fp32_precision = _EXACT
    try:
        with torch.autocast(device, enabled=False):
            torch.clear_autocast_cache()
            yield
    finally:
        torch.clear_autocast_cache()
        if matmul_before is not None:
            torch.set_float32_matmul_precision(matmul_before)
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = _INHERITED
            if setting.fp32_precision != value:
                setting.fp32_precision = value


def _settings() -> list[Any]:
    """Return the objects with a `fp32_precision`, by library and operation."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    return [cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


def _matmul_precision() -> str | None:
    """Return the caller's matmul precision; None if the libraries have different ones, which has no name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
