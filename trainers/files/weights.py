"""State dictionaries as files: read without running any code in them, written as plain tensors, and hashed.

The hash covers the file's bytes and equals the output of `sha256sum`. A file is read once, so that the hashed
bytes are the loaded bytes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from dpgcl_core.errors import StorageError

SAFETENSORS = ".safetensors"
_MAX_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A file of named tensors.

    Attributes:
      tensors: the tensors by name, on the CPU.
      sha256: the file's hash.
    """

    tensors: Mapping[str, Tensor]
    sha256: str


def read_weights(path: Path) -> Weights:
    """Return the tensors of a `.safetensors` file, or of a state dictionary written by `torch.save`.

    No code is run: torch files are loaded with `weights_only=True`, and pickled classes are refused.

    Raises:
      StorageError: there is no such file, it is damaged, or it holds anything other than named tensors.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"the weights {path} cannot be read ({error.strerror}). Put them where every machine that trains "
            "or embeds can read them at this path."
        ) from error
    try:
        if path.suffix == SAFETENSORS:
            tensors: Any = load(content)
        else:
            tensors = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # unpicklers and parsers raise nearly anything on damaged bytes
        raise StorageError(
            f"the weights {path} cannot be read ({type(error).__name__}). Use a .safetensors file, or a "
            "state dictionary of plain tensors written by torch.save."
        ) from error
    return Weights(tensors=_named_tensors(tensors, path), sha256=hashlib.sha256(content).hexdigest())


def _named_tensors(content: Any, path: Path) -> Mapping[str, Tensor]:
    """Return the state dictionary in a file's content, after checking that it holds only named tensors."""
    if isinstance(content, Mapping) and {"step", "model", "optimizer"} <= content.keys():
        raise StorageError(
            f"{path} is the checkpoint of a training, which may have used private data. Export the model "
            "with python -m trainers.export, and pass the exported folder."
        )
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not content:
        raise StorageError(f"{path} must hold tensors by name; got {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise StorageError(
                f"{path} must hold only tensors by name; got {type(value).__name__} as {name!r}"
            )
    return content


def write_weights(path: Path, tensors: Mapping[str, Tensor], *, note: str) -> str:
    """Write a `.safetensors` file and return its sha256.

    Args:
      path: path of the file.
      tensors: a state dictionary.
      note: a note on the file that is stored in it and copied with it; see `read_note`.

    Raises:
      StorageError: the state dictionary holds anything other than tensors.
    """
    # Clones in plain memory order, because the format refuses tensors that share memory.
    plain = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in _named_tensors(tensors, path).items()
    }
    content = save(plain, metadata={"dpgcl": note})
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def read_note(path: Path) -> str | None:
    """Return the note stored in a file; None if it has none, or if it is not a `.safetensors` file."""
    if path.suffix != SAFETENSORS:
        return None
    try:
        with safe_open(path, framework="pt") as opened:
            return (opened.metadata() or {}).get("dpgcl")
    except (OSError, SafetensorError):
        return None


def misfits(tensors: Mapping[str, Tensor], template: Mapping[str, Tensor]) -> str | None:
    """Return the first differences in names and shapes of two state dictionaries; None if there are none.

    >>> misfits({"w": torch.zeros(2), "c": torch.zeros(1)}, {"w": torch.zeros(3), "b": torch.zeros(1)})
    'b: missing, needs [1]; c: has [1], not needed; w: has [2], needs [3]'
    """
    differences = []
    for name in sorted(tensors.keys() | template.keys()):
        if name not in tensors:
            differences.append(f"{name}: missing, needs {list(template[name].shape)}")
        elif name not in template:
            differences.append(f"{name}: has {list(tensors[name].shape)}, not needed")
        elif tensors[name].shape != template[name].shape:
            differences.append(f"{name}: has {list(tensors[name].shape)}, needs {list(template[name].shape)}")
    if not differences:
        return None
    rest = f"; and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
    return "; ".join(differences[:_MAX_SHOWN]) + rest
