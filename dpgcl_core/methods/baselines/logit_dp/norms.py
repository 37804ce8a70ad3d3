"""Norms of all n² similarity gradients of a batch, without n² gradients.

With unit embeddings z_i of the queries and z'_j of the keys, of dimension d, and their Jacobians J_i and J'_j
(d rows each), ∇Z_ij = J_iᵀ z'_j + J'_jᵀ z_i, so that

    ‖∇Z_ij‖² = z'_jᵀ (J_i J_iᵀ) z'_j + z_iᵀ (J'_j J'_jᵀ) z_i + 2 z'_jᵀ (J_i J'_jᵀ) z_i.

The first two terms need one d × d Gram matrix per record and tower. d backward passes of many rows at once
bring the output gradients of every layer, from which the module `layers` computes the matrices. The cross
term is exactly zero where the towers share no parameter. Otherwise it is computed pair by pair, layer by
layer, or bounded: ‖∇Z_ij‖ ≤ ‖J_iᵀ z'_j‖ + ‖J'_jᵀ z_i‖. Each pass holds rows of similar rank (see the module
`jacobians`), for it costs what its largest rank costs.

*A row's numbers follow no other row.* Every pass has the same number of rows, filled up with zeros, and one
memory layout; the way through the network, the parameters of a tower and each layer's way to its products are
decided on made-up rows and public numbers. Another record changes a row's companions and its place, no shape.

*No norm is too small.* The tensors that are measured here are those that are summed, and all products of
gradients with each other are float64. Their rounding, and what a row's place may change in float32, grow with
the terms and not with their sum. So a norm counts as at least `PAIR_NORM_FLOOR` of the magnitude bound of
both Jacobians: no factor exceeds B/(share · bound).

A network that is not supported has the Jacobian of each row computed by itself: exact, slower. The
derivation: docs/theory/logit-dp.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.types import Embed, trainable_parameters
from dpgcl_core.clipping.verification import Verdicts
from dpgcl_core.errors import ConfigError
from dpgcl_core.methods.baselines.logit_dp.jacobians import Rows, by_layer, ranks, row_by_row
from dpgcl_core.methods.baselines.logit_dp.layers import cross, has_parts

logger = logging.getLogger(__name__)

PAIR_NORM_FLOOR = 1e-3
"""A pair's norm counts as at least this share of the magnitude bound of its two Jacobians."""

ROW_BY_ROW = "one row at a time"
BY_LAYER = "layer by layer"

_MAX_PASS_NUMBERS = 2**26  # 256 MiB of output gradients at a time
_MAX_ROWS = 128
_SELF_CHECK_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Side:
    """What the pair norms need from one tower's rows.

    Attributes:
      z: `[n, dim]` embeddings; zero where the row is not finite.
      gram: float64 `[n, dim, dim]`, J Jᵀ of each row; zero where the row is not finite.
      magnitude_bound: float64 `[n]`.
      finite: `[n]`.
      path: how the Jacobians were computed.
    """

    z: Tensor
    gram: Tensor
    magnitude_bound: Tensor
    finite: Tensor
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
    return Side(**tensors, path=sides[-1].path)


def summary(rows: Rows, path: str) -> Side:
    """Return Gram matrices and magnitude bounds of these rows."""
    dim = rows.z.shape[1]
    gram = torch.zeros(len(rows.z), dim, dim, dtype=torch.float64, device=rows.z.device)
    basis, along_basis = None, gram.new_zeros(())
    for share in rows.shares:
        if share.basis is None:
            gram += share.gram()
        else:  # all have the same one, so it is their sum that is brought back to the axes
            basis, along_basis = share.basis, along_basis + share.gram()
    if basis is not None:
        gram += basis @ along_basis @ basis.transpose(1, 2)
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


class _Pass(NamedTuple):
    """Rows that went through the network together, in order, and their Jacobians where these are kept."""

    chosen: Tensor
    kept: list[tuple[Tensor, Rows]] | None


class Jacobians:
    """The Jacobians of one tower's rows: measured in `side`, and the very same ones summed in `add_products`.

    Every pass layer by layer has the same number of rows, filled up with zeros, and its rows' inputs are
    copied into one layout. How many rows, which way (layer by layer or row by row) and which parameters a
    tower has is decided on made-up rows, before any record is seen.

    Args:
      model: the network that owns the parameters.
      embed: the tower.
      inputs: `[1, n, views, ...]`; the rows are its records' views, in order.
      tower: its number, under which the self-check's result is remembered.
      isolated: go row by row, whatever the network.

    Attributes:
      partners: how many rows of the other tower each row is expected to meet in cross terms, a public number
        by which layers choose between two exact ways; 0 where there are no cross terms.
    """

    def __init__(
        self, model: nn.Module, embed: Embed, inputs: Tensor, *, tower: int = 0, isolated: bool = False
    ) -> None:
        self._isolated = isolated
        self._model, self.embed, self.inputs, self._tower = model, embed, inputs, tower
        self._parameters = trainable_parameters(model)
        self._rows = inputs.flatten(1, 2)[:, :, None]
        self._activations, self._dim = _sizes(model, embed, inputs[:, :1])
        self._passes: list[_Pass] = []
        self.partners = 0

    @cached_property
    def _known(self) -> _Known:
        if self._isolated:
            return _Known(ROW_BY_ROW, frozenset(self._parameters))
        return _look_at(self._model, self.embed, self._rows, self._tower, self._rows_by_layer)

    @property
    def path(self) -> str:
        """How Jacobians are computed."""
        return self._known.path

    @property
    def parameters(self) -> frozenset[Tensor]:
        """The parameters that the tower uses."""
        return self._known.parameters

    @property
    def _rows_by_layer(self) -> int:
        return max(1, min(_MAX_ROWS, _MAX_PASS_NUMBERS // max(1, self._activations * self._dim)))

    @property
    def rows_at_once(self) -> int:
        """Rows of one pass along all axes."""
        if self.path == BY_LAYER:
            return self._rows_by_layer
        numbers = sum(p.numel() for p in self._parameters)
        return max(1, min(_MAX_ROWS, _MAX_PASS_NUMBERS // max(1, numbers * self._dim)))

    def _of_one_pass(self, inputs: Tensor) -> Iterator[tuple[Tensor, Rows]]:
        """Yield the Jacobians of at most `rows_at_once` rows `[1, rows, 1, ...]`, with their places.

        Where a pass takes another way through the network than made-up rows did, some row of it is the
        reason: each takes a pass alone, and those that differ by themselves go row by row.
        """
        places = torch.arange(inputs.shape[1], device=inputs.device)
        if self.path == ROW_BY_ROW:
            yield places, row_by_row(self._parameters, self.embed, inputs)
            return
        together = self._by_layer(inputs)
        if together is not None:
            yield places, together
            return
        for place in places[:, None]:
            alone = self._by_layer(inputs[:, place])
            yield place, self._one_row(inputs[:, place]) if alone is None else alone

    def _by_layer(self, inputs: Tensor) -> Rows | None:
        """Return the rows of a pass; None where it takes another way through the network."""
        filled = _filled(inputs, self._rows_by_layer)
        try:
            rows = by_layer(self._model, self._parameters, self.embed, filled, self.partners)
        except NotSeparableError:
            return None
        used = {share.part.parameter for share in rows.shares}
        return rows.at(slice(inputs.shape[1])) if used <= self.parameters else None

    def _one_row(self, inputs: Tensor) -> Rows:
        """Return a row by itself; it is nan if it uses a parameter that its tower is not known to use."""
        rows = row_by_row(self._parameters, self.embed, inputs)
        known = [share for share in rows.shares if share.part.parameter in self.parameters]
        others = [share for share in rows.shares if share.part.parameter not in self.parameters]
        if any(bool(share.values.any()) for share in others):
            known, rows = [], replace(rows, z=torch.full_like(rows.z, torch.nan))
        return replace(rows, shares=known)

    def of_similar_rank(self, inputs: Tensor) -> Iterator[tuple[Tensor, Rows]]:
        """Yield rows in passes of similar rank, with their indices: a pass costs what its largest rank costs.

        Args:
          inputs: `[1, rows, 1, ...]`, views of any records of this tower.
        """
        for chosen in self._cut(inputs):
            for at, rows in self._of_one_pass(inputs[:, chosen]):
                yield chosen[at], rows

    def _cut(self, inputs: Tensor) -> Sequence[Tensor]:
        """Return the rows of every pass."""
        order = torch.arange(inputs.shape[1], device=inputs.device)
        found = self._ranks(inputs)
        if found is not None:
            order = found.argsort(stable=True)
        return torch.split(order, self.rows_at_once) if len(order) else ()

    def _ranks(self, inputs: Tensor) -> Tensor | None:
        if self.path == ROW_BY_ROW or inputs.shape[1] <= self.rows_at_once:
            return None
        found = []
        try:
            for some in torch.split(inputs, self.rows_at_once, dim=1):
                filled = _filled(some, self._rows_by_layer)
                found.append(ranks(self._model, self._parameters, self.embed, filled))
        except NotSeparableError:
            return None
        known = [each for each in found if each is not None]
        return torch.cat(known)[: inputs.shape[1]] if len(known) == len(found) else None

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
        """Return Gram matrices and magnitude bounds of all rows; keep up to `max_kept` numbers more."""
        self._passes, found, num_kept = [], [], 0
        for chosen in self._cut(self._rows):
            parts = [(chosen[at], rows) for at, rows in self._of_one_pass(self._rows[:, chosen])]
            found += [(at, summary(rows, self.path)) for at, rows in parts]
            numbers = sum(rows.num_numbers for _, rows in parts)
            fits = num_kept + numbers <= max_kept
            num_kept += numbers if fits else 0
            self._passes.append(_Pass(chosen, parts if fits else None))
        places, sides = zip(*found, strict=True)
        return joined(sides).at(torch.cat(places).argsort())

    @property
    def kept(self) -> list[tuple[Tensor, Rows]] | None:
        """All rows with their indices; None where not all are kept."""
        parts = [each.kept for each in self._passes]
        whole = [part for part in parts if part is not None]
        return [row for part in whole for row in part] if len(whole) == len(parts) else None

    def add_products(self, total: Tensor, side: Side, cotangents: Tensor) -> Tensor:
        """Add Σ_r J_rᵀ c_r to `total`, of the very Jacobians that `side` was computed from.

        Jacobians that were not kept are computed again, by the same call on the same pass. A row whose Gram
        matrix then differs in any bit adds nothing: a decision about this row alone. So does a row that is
        not finite.

        Args:
          total: `[num_parameters]`.
          side: what the method of this name returned last.
          cotangents: c, float64 `[rows, dim]`: so are the products.

        Returns:
          Which rows were computed again and differed, `[rows]`.
        """
        places = places_of(self._parameters)
        differs = torch.zeros_like(side.finite)
        for chosen, kept in self._passes:
            parts = kept
            if parts is None:
                parts = [(chosen[at], rows) for at, rows in self._of_one_pass(self._rows[:, chosen])]
            for at, rows in parts:
                if kept is None:
                    again = summary(rows, self.path).gram
                    differs[at] = (again != side.gram[at]).flatten(1).any(1)
                good = side.finite[at] & ~differs[at]
                if not bool(good.all()):  # 0·inf is not 0
                    some = good.nonzero()[:, 0]
                    at, rows = at[some], rows.at(some)
                for share in rows.shares if len(at) else ():
                    total[places[share.part.parameter]] += share.combined(cotangents[None, at])[0]
        return differs


def _filled(inputs: Tensor, num_rows: int) -> Tensor:
    """Return rows `[1, rows, 1, ...]` filled up with zeros to `num_rows`, always in one layout."""
    filled = inputs.new_zeros(1, num_rows, *inputs.shape[2:])
    filled[:, : inputs.shape[1]] = inputs
    return filled


def places_of(parameters: Sequence[nn.Parameter]) -> dict[Tensor, slice]:
    """Return every parameter's place in the flat vector."""
    places: dict[Tensor, slice] = {}
    start = 0
    for parameter in parameters:
        places[parameter] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return places


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


class _Known(NamedTuple):
    """What is known of a tower before any record is seen."""

    path: str
    parameters: frozenset[Tensor]


_checked: Verdicts[_Known] = Verdicts()


def _look_at(model: nn.Module, embed: Embed, rows: Tensor, tower: int, num_rows: int) -> _Known:
    """Return the way through a tower, and its parameters: tried once, on made-up rows, perturbed weights."""

    def look() -> _Known:
        wrong, parameters = _self_check(model, embed, rows, num_rows)
        if wrong:
            logger.warning("Jacobians are computed one row at a time (exact, slower): %s", wrong)
        return _Known(ROW_BY_ROW if wrong else BY_LAYER, parameters)

    return _checked.of(model, embed, (tower, num_rows, rows.shape[3:], rows.dtype), look)


def _self_check(model: nn.Module, embed: Embed, rows: Tensor, num_rows: int) -> tuple[str, frozenset[Tensor]]:
    """Compare both ways on a pass of made-up rows; return how they differ, and the parameters in use.

    It finds errors that layer types do not reveal, such as reordered records or dropout. The weights are
    perturbed, so that a zero initialisation hides no branch, and restored bit for bit.
    """
    state = [(value, value.detach().clone()) for value in (*model.parameters(), *model.buffers())]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
        synthetic = _synthetic(model, rows, num_rows, generator)
        with torch.no_grad():
            first, second = embed(synthetic), embed(synthetic)
        if not torch.equal(first, second):
            raise ConfigError(
                "embeddings and gradients come from two passes, which must agree, but this network draws "
                "random numbers: set its dropout to 0 or call eval()"
            )
        return _compare(model, embed, synthetic)
    finally:
        with torch.no_grad():
            for value, before in state:
                value.copy_(before)
        torch.clear_autocast_cache()  # of casts of the perturbed weights


def _synthetic(model: nn.Module, like: Tensor, num_rows: int, generator: torch.Generator) -> Tensor:
    shape = (1, num_rows, *like.shape[2:])
    if not like.is_floating_point():
        vocabulary = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
        return torch.randint(min(vocabulary, default=2), shape, generator=generator).to(like)
    levels = 2 * torch.rand((*shape[:3], *(1 for _ in shape[3:])), generator=generator) - 1
    return (levels + torch.rand(shape, generator=generator) - 0.5).to(like)


def _compare(model: nn.Module, embed: Embed, rows: Tensor) -> tuple[str, frozenset[Tensor]]:
    parameters = trainable_parameters(model)
    every = frozenset[Tensor](parameters)
    some = torch.tensor([0, rows.shape[1] // 2, rows.shape[1] - 1], device=rows.device)
    exact = row_by_row(parameters, embed, rows[:, some])
    try:
        found = by_layer(model, parameters, embed, rows, 0)
    except NotSeparableError as error:
        return str(error), every
    except ConfigError:
        raise
    except Exception as error:  # whatever a module does to a hook; the exact way needs none
        return f"it fails on made-up inputs ({type(error).__name__}: {error})", every
    gram = summary(exact, "").gram
    difference = (summary(found.at(some), "").gram - gram).flatten(1).norm(dim=1)
    if bool((difference > _SELF_CHECK_TOLERANCE * gram.flatten(1).norm(dim=1)).any()):
        return "Gram matrices differ from exact ones on made-up inputs", every
    return "", frozenset(share.part.parameter for share in found.shares)
