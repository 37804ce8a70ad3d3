"""Clipping by parts (stage 7): which trainable parameters are clipped together, with the proof of bound C."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.one_pass import squares_of
from dpgcl_core.errors import ConfigError

Owners = tuple[int, ...]
"""The part of each trainable parameter, in the order of `trainable_parameters`."""


@dataclass(frozen=True, kw_only=True)
class ClippingParts:
    """Clipping by parts: the trainable parameters in m parts, each part clipped separately to C/√m.

    Part p holds the parameters whose names begin with `prefixes[p]` and with no earlier prefix. All other
    parameters are the last part, so m = len(prefixes) + 1. A large gradient of one part then leaves a small
    gradient of another part unchanged. If a part does not use all of C/√m, the other parts do not get it.

    Guarantee: a group contributes a vector of norm at most C whatever its gradient is, so the sum has the
    same sensitivity as without parts for adding or removing one record: C if groups are sampled, 2C if
    records are sampled (C for groups of one).

    Proof sketch. Prefixes are public, so the parts are constants, and a gradient is the orthogonal sum of
    its parts g_p. Each part contributes f_p·g_p of norm at most C/√m, so ‖Σ f_p·g_p‖² ≤ m·(C/√m)² = C². A
    group with a part that is not finite contributes zero in every part, because the rest of an overflown
    gradient is unreliable. The whole argument is in docs/theory/clipping.md.

    Attributes:
      prefixes: prefixes of names in `model.named_parameters()`, as plain text: "tower." selects that module,
        "tower" also other names that begin with it.

    Raises:
      ConfigError: there is no prefix, or a prefix is empty or repeated.
    """

    prefixes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.prefixes or not all(self.prefixes) or len(set(self.prefixes)) < len(self.prefixes):
            raise ConfigError(
                "prefixes of clipping parts must be one or more different names that are not empty; "
                f"got {self.prefixes!r}"
            )

    def owners(self, model: nn.Module) -> Owners:
        """Return the index of each trainable parameter's part, chosen by the parameter's name.

        Raises:
          ConfigError: a part holds no trainable parameter, so its share of C would be wasted.

        >>> ClippingParts(prefixes=("0.",)).owners(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        (0, 0, 1, 1)
        """
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        last = len(self.prefixes)
        owners = tuple(
            next((part for part, prefix in enumerate(self.prefixes) if name.startswith(prefix)), last)
            for name in names
        )
        for part, prefix in enumerate(self.prefixes):
            if part not in owners:
                known = sorted({".".join(name.split(".")[:2]) for name in names})
                raise ConfigError(
                    "every clipping part must hold a trainable parameter; no name outside the earlier parts "
                    f"begins with {prefix!r}. Trainable names begin with: {', '.join(known)}"
                )
        if last not in owners:
            raise ConfigError(
                "every clipping part must hold a trainable parameter; the last part is empty, because every "
                f"name begins with one of the prefixes {', '.join(self.prefixes)}. Leave out one of them"
            )
        return owners


def runs_of(parameters: list[nn.Parameter], owners: Owners | None) -> list[tuple[int, slice]]:
    """Return (part, slice) for every run of adjacent parameters of one part in the flat vector, in order."""
    runs, start = [], 0
    pairs = zip(owners or (0,) * len(parameters), parameters, strict=True)
    for part, run in groupby(pairs, key=lambda pair: pair[0]):
        stop = start + sum(parameter.numel() for _, parameter in run)
        runs.append((part, slice(start, stop)))
        start = stop
    return runs


def norms_of(flat: Tensor, runs: list[tuple[int, slice]]) -> Tensor:
    """Return the norms of the parts of a flat gradient, float32 `[parts, 1]`."""
    squares = flat.new_zeros((max(part for part, _ in runs) + 1, 1), dtype=torch.float64)
    for part, run in runs:
        squares[part] += squares_of(flat[None, run])
    return squares.sqrt().float()
