"""Norms of all n² similarity gradients of a batch, without n² gradients.

With unit embeddings z_i of the queries and z'_j of the keys, of dimension d, and their Jacobians J_i and J'_j
(d rows each), ∇Z_ij = J_iᵀ z'_j + J'_jᵀ z_i, so that

    ‖∇Z_ij‖² = z'_jᵀ (J_i J_iᵀ) z'_j + z_iᵀ (J'_j J'_jᵀ) z_i + 2 z'_jᵀ (J_i J'_jᵀ) z_i.

The first two terms need one d × d Gram matrix per record and tower. d backward passes of many rows at once
bring the output gradients of every layer, from which the module `layers` computes the matrices. The cross
term is exactly zero where the towers share no parameter. Otherwise it is computed pair by pair, layer by
layer, or bounded: ‖∇Z_ij‖ ≤ ‖J_iᵀ z'_j‖ + ‖J'_jᵀ z_i‖. Without cross terms rows need not keep the records'
order: each pass holds rows of similar rank (see the module `jacobians`), for it costs what its largest rank
costs.

*No norm is too small.* All products of gradients with each other are float64. What remains is float32
rounding in the backward passes and in the gradients themselves, which grows with the terms and not with
their sum. So a norm counts as at least `PAIR_NORM_FLOOR` of the magnitude bound of both Jacobians: with a
factor of at most B/(share · bound), a rounding of 1e-7 of the bound is at most 1e-4 B, the clipper's margin.

A network that is not supported has the Jacobian of each row computed by itself: exact, slower. The
derivation: docs/theory/logit-dp.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.types import Embed, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.methods.baselines.logit_dp.jacobians import Rows, by_layer, ranks, row_by_row
from dpgcl_core.methods.baselines.logit_dp.layers import cross, has_parts

logger = logging.getLogger(__name__)

PAIR_NORM_FLOOR = 1e-3
"""A pair's norm counts as at least this share of the magnitude bound of its two Jacobians."""

ROW_BY_ROW = "one row at a time"
BY_LAYER = "layer by layer"

_MAX_PASS_NUMBERS = 2**26  # 256 MiB of output gradients at a time
_MAX_ROWS = 256
_SELF_CHECK_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Side:
    """What the pair norms need from one tower's rows.

    Attributes:
      z: `[n, dim]` embeddings; zero where the row is not finite.
      gram: float64 `[n, dim, dim]`, J Jᵀ of each row; zero where the row is not finite.
      magnitude_bound: float64 `[n]`.
      finite: `[n]`.
      parameters: those that any layer uses.
      path: how the Jacobians were computed.
    """

    z: Tensor
    gram: Tensor
    magnitude_bound: Tensor
    finite: Tensor
    parameters: frozenset[Tensor]
    path: str

    def every(self, start: int, step: int) -> Side:
        """Return every `step`-th row from `start` on."""
        return self.at(slice(start, None, step))

    def at(self, chosen: slice | Tensor) -> Side:
        """Return these rows."""
        return Side(
            z=self.z[chosen],
            gram=self.gram[chosen],
            magnitude_bound=self.magnitude_bound[chosen],
            finite=self.finite[chosen],
            parameters=self.parameters,
            path=self.path,
        )

    def squares_along(self, directions: Tensor) -> Tensor:
        """Return ‖J_iᵀ v_j‖² of every row i and direction j, float64 `[n, m]`; directions are `[m, dim]`."""
        v = directions.double()
        squares = v[:, :, None] * v[:, None]
        return (self.gram.flatten(1) @ squares.flatten(1).T).clamp_min(0)


def joined(sides: Sequence[Side]) -> Side:
    """Return the rows of all sides, in order."""
    tensors = {
        name: torch.cat([getattr(s, name) for s in sides])
        for name in ("z", "gram", "magnitude_bound", "finite")
    }
    parameters = frozenset[Tensor]().union(*(side.parameters for side in sides))
    return Side(**tensors, parameters=parameters, path=sides[-1].path)


def summary(rows: Rows, path: str) -> Side:
    """Return Gram matrices and magnitude bounds of these rows."""
    dim = rows.z.shape[1]
    gram = torch.zeros(len(rows.z), dim, dim, dtype=torch.float64, device=rows.z.device)
    for share in rows.shares:
        gram += share.gram()
    finite = (
        torch.isfinite(rows.z).all(1)
        & torch.isfinite(gram).all((1, 2))
        & torch.isfinite(rows.magnitude_bound)
    )
    return Side(
        z=torch.where(finite[:, None], rows.z, 0.0),
        gram=torch.where(finite[:, None, None], gram, 0.0),
        magnitude_bound=torch.where(finite, rows.magnitude_bound, 0.0),
        finite=finite,
        parameters=frozenset(share.part.parameter for share in rows.shares),
        path=path,
    )


def cross_terms(queries: Rows, keys: Rows) -> Tensor:
    """Return z'_jᵀ (J_i J'_jᵀ) z_i of every query i and key j, float64 `[I, J]`."""
    of_queries = keys.z.double()[None].expand(len(queries.z), -1, -1)
    of_keys = queries.z.double()[:, None].expand(-1, len(keys.z), -1)
    total = torch.zeros(len(queries.z), len(keys.z), dtype=torch.float64, device=keys.z.device)
    others = {share.part.parameter: share for share in keys.shares}
    for share in queries.shares:
        if share.part.parameter in others:
            total += cross(share, others[share.part.parameter], of_queries, of_keys)
    return total


class Jacobians:
    """Computes the Jacobians of one tower's rows, in passes of as many records as fit.

    Args:
      model: the network that owns the parameters.
      embed: the tower.
      inputs: `[1, n, views, ...]`; the rows are its records' views, in order.
      tower: its number, under which the self-check's result is remembered.
      partners: rows that each row meets in cross terms; 0 where there are none.
    """

    def __init__(
        self, model: nn.Module, embed: Embed, inputs: Tensor, *, tower: int = 0, partners: int = 0
    ) -> None:
        self._partners = partners
        self._model, self.embed, self.inputs, self._tower = model, embed, inputs, tower
        self._parameters = trainable_parameters(model)
        self.num_records, self.num_views = inputs.shape[1:3]
        self._activations, self._dim = _sizes(model, embed, inputs[:, :1])
        self._kept: dict[tuple[int, int], Rows] = {}
        self._num_kept = 0

    @cached_property
    def path(self) -> str:
        """How Jacobians are computed."""
        good = _goes_by_layer(self._model, self.embed, self.inputs, self._tower, self._partners)
        return BY_LAYER if good else ROW_BY_ROW

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """The records of every pass."""
        return self._cut(self.rows_at_once)

    @property
    def rows_at_once(self) -> int:
        """Rows of one pass along all axes."""
        numbers = self._activations
        if self.path == ROW_BY_ROW:
            numbers = sum(p.numel() for p in self._parameters)
        return max(1, min(_MAX_ROWS, _MAX_PASS_NUMBERS // max(1, numbers * self._dim)))

    @property
    def backward_ranges(self) -> list[tuple[int, int]]:
        """The records of every ordinary backward pass."""
        return self._cut(min(_MAX_ROWS, _MAX_PASS_NUMBERS // max(1, 4 * self._activations)))

    def _cut(self, num_rows: int) -> list[tuple[int, int]]:
        at_once, n = max(1, num_rows // self.num_views), self.num_records
        return [(start, min(start + at_once, n)) for start in range(0, n, at_once)]

    def rows(self, start: int, stop: int) -> Rows:
        """Return the rows of some records."""
        if (start, stop) in self._kept:
            return self._kept[start, stop]
        return self._rows_of(self.inputs[:, start:stop])

    def _rows_of(self, inputs: Tensor) -> Rows:
        if self.path == BY_LAYER:
            try:
                return by_layer(self._model, self._parameters, self.embed, inputs, self._partners)
            except NotSeparableError:  # these inputs took another path through the network
                pass
        return row_by_row(self._parameters, self.embed, inputs)

    def of_similar_rank(self, inputs: Tensor) -> Iterator[tuple[Tensor, Rows]]:
        """Yield rows in passes of similar rank, with their indices: a pass costs what its largest rank costs.

        Args:
          inputs: `[1, rows, 1, ...]`, views of any records of this tower.
        """
        order = torch.arange(inputs.shape[1], device=inputs.device)
        found = self._ranks(inputs)
        if found is not None:
            order = found.argsort(stable=True)
        for chosen in torch.split(order, self.rows_at_once) if len(order) else ():
            yield chosen, self._rows_of(inputs[:, chosen])

    def _ranks(self, inputs: Tensor) -> Tensor | None:
        if self.path == ROW_BY_ROW or inputs.shape[1] <= self.rows_at_once:
            return None
        found = []
        try:
            for some in torch.split(inputs, self.rows_at_once, dim=1):
                found.append(ranks(self._model, self._parameters, self.embed, some))
        except NotSeparableError:
            return None
        known = [each for each in found if each is not None]
        return torch.cat(known) if len(known) == len(found) else None

    def along(self, inputs: Tensor, cotangents: Tensor) -> Rows:
        """Return the gradients of ⟨z_r, c_r⟩ of rows `[1, rows, 1, ...]`, for c `[rows, dim]`."""
        try:
            return by_layer(self._model, self._parameters, self.embed, inputs, 0, cotangents[None])
        except NotSeparableError:  # these inputs took another path through the network
            rows = row_by_row(self._parameters, self.embed, inputs)
            shares = [
                replace(share, values=torch.einsum("rk,rkn->rn", cotangents, share.values)[:, None])
                for share in rows.shares
            ]
            return replace(rows, shares=shares)

    def side(self, max_kept: int = 0) -> Side:
        """Return Gram matrices and magnitude bounds of all rows; keep up to `max_kept` numbers."""
        if not self._partners:
            passes = self.of_similar_rank(self.inputs.flatten(1, 2)[:, :, None])
            places, found = zip(*((at, summary(rows, self.path)) for at, rows in passes), strict=True)
            return joined(found).at(torch.cat(places).argsort())
        sides = []
        for start, stop in self.ranges:
            rows = self.rows(start, stop)
            if self._num_kept + rows.num_numbers <= max_kept:
                self._kept[start, stop] = rows
                self._num_kept += rows.num_numbers
            sides.append(summary(rows, self.path))
        return joined(sides)


def _sizes(model: nn.Module, embed: Embed, inputs: Tensor) -> tuple[int, int]:
    """Return the size of all layers' outputs for one row, and the embedding's dimension."""
    numbers = 0

    def count(module: nn.Module, args: object, output: Tensor) -> None:
        nonlocal numbers
        numbers += output.numel()

    handles = [m.register_forward_hook(count) for m in model.modules() if has_parts(m)]
    try:
        with torch.no_grad():
            z = embed(torch.zeros_like(inputs))
    finally:
        for handle in handles:
            handle.remove()
    if z.shape[:-1] != inputs.shape[:3]:
        raise ConfigError(
            f"embeddings must be [groups, group_size, views, dim] like their inputs; got {list(z.shape)} "
            f"for inputs {list(inputs.shape)}"
        )
    return numbers // inputs.shape[2], z.shape[-1]


_checked: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], bool]] = WeakKeyDictionary()


def _goes_by_layer(model: nn.Module, embed: Embed, inputs: Tensor, tower: int, partners: int) -> bool:
    """Return whether `by_layer` is exact for this tower: tried once on synthetic rows, perturbed weights."""
    known = _checked.setdefault(model, {})
    key = (tower, partners > 0, inputs.shape[2:])
    if key not in known:
        wrong = _self_check(model, embed, inputs, partners)
        if wrong:
            logger.warning("Jacobians are computed one row at a time (exact, slower): %s", wrong)
        known[key] = not wrong
    return known[key]


def _self_check(model: nn.Module, embed: Embed, inputs: Tensor, partners: int) -> str:
    """Compare both ways on three synthetic records; return how they differ, empty if they do not.

    It finds errors that layer types do not reveal, such as reordered records or dropout. The weights are
    perturbed, so that a zero initialisation hides no branch, and restored bit for bit.
    """
    state = [(value, value.detach().clone()) for value in (*model.parameters(), *model.buffers())]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
        synthetic = _synthetic(model, inputs, generator)
        with torch.no_grad():
            first, second = embed(synthetic), embed(synthetic)
        if not torch.equal(first, second):
            raise ConfigError(
                "embeddings and gradients come from two passes, which must agree, but this network draws "
                "random numbers: set its dropout to 0 or call eval()"
            )
        return _compare(model, embed, synthetic, partners)
    finally:
        with torch.no_grad():
            for value, before in state:
                value.copy_(before)


def _synthetic(model: nn.Module, like: Tensor, generator: torch.Generator) -> Tensor:
    shape = (1, 3, *like.shape[2:])
    if not like.is_floating_point():
        vocabulary = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
        return torch.randint(min(vocabulary, default=2), shape, generator=generator).to(like)
    levels = 2 * torch.rand((*shape[:3], *(1 for _ in shape[3:])), generator=generator) - 1
    return (levels + torch.rand(shape, generator=generator) - 0.5).to(like)


def _compare(model: nn.Module, embed: Embed, inputs: Tensor, partners: int) -> str:
    parameters = trainable_parameters(model)
    exact = row_by_row(parameters, embed, inputs)
    try:
        found = by_layer(model, parameters, embed, inputs, partners)
    except NotSeparableError as error:
        return str(error)
    except ConfigError:
        raise
    except Exception as error:  # whatever a module does to a hook; the exact way needs none
        return f"it fails on synthetic inputs ({type(error).__name__}: {error})"
    difference = (summary(found, "").gram - summary(exact, "").gram).flatten(1).norm(dim=1)
    if bool((difference > _SELF_CHECK_TOLERANCE * summary(exact, "").gram.flatten(1).norm(dim=1)).any()):
        return "Gram matrices differ from exact ones on synthetic inputs"
    return ""
