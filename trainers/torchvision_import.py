"""Makes `import torchvision` work together with a CPU build of torch.

A torchvision built for CUDA cannot load its compiled operators with a CPU torch. Its import then fails,
because it registers shapes for operators that nobody declared. timm, open_clip and peft import it and fail
too, although image towers need none of those operators.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

_UNDECLARED = "operator torchvision::nms does not exist"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def ensure_torchvision_import() -> None:
    """Import torchvision; if only two undeclared operators prevent that, declare them and try again.

    Nothing is changed if the import works. The operators are declared, not defined:
    `torchvision.ops.nms` still raises when it is called. Call this in every process, Ray workers
    included, before open_clip, timm or peft are imported.

    Raises:
      Exception: any other exception of the import, unchanged.

    >>> ensure_torchvision_import()
    >>> import torchvision
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if str(error) != _UNDECLARED:
            raise
        for operator in _OPERATORS:
            torch.library.define(f"torchvision::{operator}", _SCHEMA)
        importlib.import_module("torchvision")


def open_clip() -> Any:
    """Import open_clip and return it; the import takes a second, which other networks' trainings save."""
    ensure_torchvision_import()
    return importlib.import_module("open_clip")


def script_import(package: str) -> str:
    """Return the source of `import package`, after `ensure_torchvision_import` if this machine needs it."""
    ensure_torchvision_import()
    is_whole: bool = importlib.import_module("torchvision.extension")._has_ops()
    repair = "from trainers.torchvision_import import ensure_torchvision_import as repair; repair(); "
    return f"{'' if is_whole else repair}import {package}"
