"""Stage 7 by parts: which trainable parameters are clipped together, and why the bound C stays."""

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
    """Clipping by parts: the trainable parameters in m parts, each clipped to C/√m by itself.

    Part p holds what begins with `prefixes[p]` and with no earlier prefix; everything else is the last
    part, so m = len(prefixes) + 1. A large gradient of one part then takes nothing from a small one of
    another; what a part leaves of its C/√m is not given to the others.

    Proposition. A group contributes a vector of norm at most C whatever its gradient g is. The sum's
    sensitivity is that of clipping as a whole: 2C, and C for groups of one.

    Proof. Names and prefixes are public and follow no record, so m and the parts are constants. A parameter
    has one name (a tied one its first), hence one part: g is the orthogonal sum of g_1, …, g_m. Part p
    contributes f_p·g_p with f_p = min(1, (C/√m)(1 − 1e-4)/‖g_p‖), or (C/√m)(1 − 1e-4)/(‖g_p‖ + γ), whose norm
    is at most C/√m as in `dpgcl_core.clipping.clipper` with C/√m for C. So ‖Σ f_p·g_p‖² = Σ ‖f_p·g_p‖²
    ≤ m·(C/√m)² = C². A group with a part that is not finite contributes zero in every part, and ‖0‖ ≤ C; it
    does so by its own gradient alone. The contribution is thus a function of one group, of norm at most C,
    and `dpgcl_core.sampling.groups` asks for nothing more. ∎

    The whole group is left out, not that part alone: the rest of a gradient that overflowed somewhere is
    not to be trusted, and `GroupReport.non_finite` keeps its meaning.

    Attributes:
      prefixes: of names in `model.named_parameters()`, plain text: "tower." is that module, "tower" also
        what begins so.

    Raises:
      ConfigError: there is no prefix, an empty one, or one twice.
    """

    prefixes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.prefixes or not all(self.prefixes) or len(set(self.prefixes)) < len(self.prefixes):
            raise ConfigError(
                "prefixes of clipping parts must be one or more different names, none of them empty; "
                f"got {self.prefixes!r}"
            )

    def owners(self, model: nn.Module) -> Owners:
        """Return the part of each trainable parameter; the parts of a model are those of its names.

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
                    f"every clipping part must hold a trainable parameter; no name begins with {prefix!r} "
                    f"and with no earlier prefix. Trainable are: {', '.join(known)}"
                )
        if last not in owners:
            raise ConfigError(
                "every clipping part must hold a trainable parameter; the last one, everything without a "
                f"prefix, is empty for prefixes {', '.join(self.prefixes)}. Leave out one of them"
            )
        return owners


def runs_of(parameters: list[nn.Parameter], owners: Owners | None) -> list[tuple[int, slice]]:
    """Return (part, its numbers) of the flat vector, neighbours of one part together."""
    runs, start = [], 0
    pairs = zip(owners or (0,) * len(parameters), parameters, strict=True)
    for part, run in groupby(pairs, key=lambda pair: pair[0]):
        stop = start + sum(parameter.numel() for _, parameter in run)
        runs.append((part, slice(start, stop)))
        start = stop
    return runs


def norms_of(flat: Tensor, runs: list[tuple[int, slice]]) -> Tensor:
    """Return the norms of a gradient's parts, float32 `[parts, 1]`."""
    squares = flat.new_zeros((max(part for part, _ in runs) + 1, 1), dtype=torch.float64)
    for part, run in runs:
        squares[part] += squares_of(flat[None, run])
    return squares.sqrt().float()
