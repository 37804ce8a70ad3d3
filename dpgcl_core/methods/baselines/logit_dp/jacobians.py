"""Jacobians of many rows' embeddings, layer by layer, for the pair norms and the clipped sum of Logit-DP.

A row is one view of one record. One forward pass of many rows is followed by one backward pass per axis of
the embedding. The network mixes no rows, so the gradient of all rows' k-th coordinates holds each row's
gradient, at the cost of an ordinary backward pass without weight gradients. Hooks record the layers' inputs,
and `layer_factors` multiplies them with the output gradients.

*A row's Jacobian depends on no other row.* Every pass has the same number of rows, filled up with zeros, and
one memory layout. The path through the network and each layer's way to compute its products depend only on
synthetic rows and public numbers. Another record changes a row's companions and its place, but no shape.

*The summed tensors are the measured tensors.* `Jacobians.measure` measures tensors, and
`Jacobians.add_products` sums the very same tensors, both in float64.

If a parameter is used in a way that is not supported, the Jacobian of each row is computed separately, which
is exact but slower.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import flat_gradient
from dpgcl_core.clipping.direct_uses import DirectUses, NotSeparableError
from dpgcl_core.clipping.isolation import perturbed
from dpgcl_core.clipping.types import Embed, trainable_parameters
from dpgcl_core.clipping.verification import Verdicts, smallest_vocabulary, synthetic_inputs
from dpgcl_core.errors import ConfigError
from dpgcl_core.methods.baselines.logit_dp.layer_factors import (
    Collector,
    Share,
    factors_of,
    has_factors,
    of_output,
)

logger = logging.getLogger(__name__)

ROW_BY_ROW = "one row at a time"
BY_LAYER = "layer by layer"

_MAX_PASS_NUMBERS = 2**26  # 256 MiB of output gradients at a time
_MAX_ROWS = 128
_SELF_CHECK_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Embeddings and Jacobians of some rows, parameter by parameter.

    Attributes:
      z: `[rows, dim]` embeddings.
      shares: the gradients of each parameter in use, along every axis of the embedding.
      magnitude_bound: float64 `[rows]`: √(Σ ‖a‖²‖b‖²) over the layers, a being a layer's input and b its
        output gradients. By Cauchy and Schwarz the terms Σ_m ‖a_m‖‖b_m‖ of the gradients, m over positions,
        are no larger, along any unit combination of axes.
    """

    z: Tensor
    shares: Sequence[Share]
    magnitude_bound: Tensor

    def at(self, rows: slice | Tensor) -> Rows:
        """Return the selected rows."""
        shares = [share.at(rows) for share in self.shares]
        return Rows(z=self.z[rows], shares=shares, magnitude_bound=self.magnitude_bound[rows])

    def gram(self) -> Tensor:
        """Return each row's Gram matrix J Jᵀ, float64 `[rows, dim, dim]`."""
        dim = self.z.shape[1]
        total = torch.zeros(len(self.z), dim, dim, dtype=torch.float64, device=self.z.device)
        for share in self.shares:
            total += share.gram()
        return total


def row_by_row(parameters: Sequence[nn.Parameter], embed: Embed, inputs: Tensor) -> Rows:
    """Return the Jacobians of all rows by one backward pass per row and axis: exact for any network."""
    embeddings, jacobians = [], []
    for index in range(inputs.shape[1]):
        with torch.enable_grad():
            z = embed(inputs[:, index : index + 1])[0, 0]
        jacobians += [_jacobian(view, parameters) for view in z]
        embeddings.append(z.detach())
    jacobian = torch.stack(jacobians)
    ones = torch.ones(len(jacobian), 1, 1, device=jacobian.device)
    each = jacobian[:, :, None].split([p.numel() for p in parameters], dim=3)
    return Rows(
        z=torch.cat(embeddings),
        shares=[Share(parameter=p, a=ones, b=b) for p, b in zip(parameters, each, strict=True)],
        magnitude_bound=torch.linalg.vector_norm(jacobian.double(), dim=(1, 2)),
    )


def _jacobian(z: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the Jacobian `[dim, num_parameters]` of one embedding."""
    if not z.requires_grad:
        return torch.zeros(len(z), sum(p.numel() for p in parameters), device=z.device)
    each = [torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True) for x in z]
    return torch.stack([flat_gradient(list(gradients), parameters) for gradients in each])


class _Call(NamedTuple):
    """One use of a layer in the forward pass."""

    module: nn.Module
    x: Tensor
    output: Tensor
    versions: tuple[int, int]


def _record_calls(
    model: nn.Module, parameters: Sequence[nn.Parameter], embed: Embed, inputs: Tensor
) -> tuple[Tensor, list[_Call]]:
    """Return the embeddings `[rows, dim]` with their graph, and the layers' calls in order.

    Parameters require no gradient meanwhile, so the graph begins at the layers' outputs.

    Raises:
      NotSeparableError: a parameter is used in a way that is not supported.
    """
    targets, num_rows = set(parameters), inputs.shape[1] * inputs.shape[2]
    names = {p: name for name, p in model.named_parameters() if p in targets}
    direct = DirectUses(names, inputs.shape[1], frozenset([num_rows]))
    calls: list[_Call] = []
    uses: Counter[Tensor] = Counter()

    def remember(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        direct.leave()
        if len(args) != 1 or not args[0].ndim or not len(args[0]) == len(output) == num_rows:
            raise NotSeparableError("a layer's leading axis differs from the inputs' leading axis")
        if output.dtype != torch.float32:
            raise NotSeparableError("a layer does not run in float32")
        if not output.requires_grad:
            output.requires_grad_()
        calls.append(_Call(module, args[0], output, (args[0]._version, output._version)))
        uses.update(p for p in module.parameters(recurse=False) if p in targets)

    layers = [m for m in model.modules() if any(p in targets for p in m.parameters(recurse=False))]
    handles = [m.register_forward_hook(remember) for m in layers if has_factors(m)]
    handles += [m.register_forward_pre_hook(direct.enter) for m in layers if has_factors(m)]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad(), direct:
            z = embed(inputs).flatten(0, 2)
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()
    if direct.used_parameters or any(count > 1 for count in uses.values()):
        direct.forget()
        raise NotSeparableError("a parameter is used outside its layer, or more than once")
    if any((call.x._version, call.output._version) != call.versions for call in calls):
        raise NotSeparableError("a layer's input or output was changed in place")
    return z, calls


def by_layer(model: nn.Module, parameters: Sequence[nn.Parameter], embed: Embed, inputs: Tensor) -> Rows:
    """Return the Jacobians of all rows by one backward pass per axis of the embedding.

    Raises:
      NotSeparableError: a parameter is used in a way that is not supported.
    """
    z, calls = _record_calls(model, parameters, embed, inputs)
    targets, collectors = set(parameters), dict[int, Collector]()
    outputs, axes = [call.output for call in calls], z.shape[1] if calls else 0
    for axis in range(axes):
        cotangent = torch.zeros_like(z)
        cotangent[:, axis] = 1
        gradients = torch.autograd.grad(z, outputs, cotangent, retain_graph=True, allow_unused=True)
        for index, (call, gradient) in enumerate(zip(calls, gradients, strict=True)):
            if gradient is None:  # the embedding does not depend on it
                continue
            b = of_output(call.module, gradient)
            with torch.no_grad():
                if axis == 0:
                    factors = factors_of(call.module, call.x.detach(), b.shape[1], targets)
                    collectors[index] = Collector(factors, axes)
                collectors[index].take(b, axis)
    squares = torch.zeros(len(z), dtype=torch.float64, device=z.device)
    for collector in collectors.values():  # squares add up over layers; the root is taken at the end
        squares += collector.squared_bound()
    shares = [share for collector in collectors.values() for share in collector.shares()]
    return Rows(z=z.detach(), shares=shares, magnitude_bound=squares.sqrt())


@dataclass(frozen=True, kw_only=True)
class RowMeasures:
    """What the pair norms are computed from: each row's embedding, Gram matrix and magnitude bound.

    Attributes:
      z: `[n, dim]` embeddings; zero if the row is not finite.
      gram: float64 `[n, dim, dim]`, J Jᵀ of each row; zero if the row is not finite.
      magnitude_bound: float64 `[n]`; zero if the row is not finite.
      finite: `[n]`, which rows are finite.
    """

    z: Tensor
    gram: Tensor
    magnitude_bound: Tensor
    finite: Tensor

    def every(self, start: int, step: int) -> RowMeasures:
        """Return every `step`-th row, beginning with row `start`."""
        return RowMeasures(**{name: values[start::step] for name, values in vars(self).items()})

    def lengths_along(self, directions: Tensor) -> Tensor:
        """Return ‖J_iᵀ v_j‖ of every row i and direction j, float64 `[n, m]`; directions are `[m, dim]`."""
        v = directions.double()
        squares = self.gram.flatten(1) @ (v[:, :, None] * v[:, None]).flatten(1).T
        return squares.clamp_min(0).sqrt()


def summary(parts: Sequence[Rows]) -> RowMeasures:
    """Return the measures of all rows of several parts, in order."""
    z = torch.cat([rows.z for rows in parts])
    gram = torch.cat([rows.gram() for rows in parts])
    magnitude_bound = torch.cat([rows.magnitude_bound for rows in parts])
    finite = torch.isfinite(z).all(1) & torch.isfinite(gram).all((1, 2)) & torch.isfinite(magnitude_bound)
    return RowMeasures(
        z=torch.where(finite[:, None], z, 0.0),
        gram=torch.where(finite[:, None, None], gram, 0.0),
        magnitude_bound=torch.where(finite, magnitude_bound, 0.0),
        finite=finite,
    )


Part = tuple[slice, Rows]  # some rows of the batch: their indices, and their Jacobians


class Jacobians:
    """The Jacobians of a batch's rows: `add_products` sums the very Jacobians that `measure` measured.

    Every pass layer by layer has the same number of rows, filled up with zeros, and its rows' inputs are
    copied into one layout. The number of rows, and the method (layer by layer or row by row), are chosen with
    synthetic rows, before any record is seen.

    Args:
      model: the network that owns the parameters.
      embed: the embedding, which calls `model`.
      inputs: `[1, n, views, ...]`; the rows are its records' views, in order.
    """

    def __init__(self, model: nn.Module, embed: Embed, inputs: Tensor) -> None:
        self._model, self._embed = model, embed
        self._parameters = trainable_parameters(model)
        self._rows = inputs.flatten(1, 2)[:, :, None]
        activations, dim = _sizes(model, embed, inputs[:, :1])
        self._num_filled = _num_rows(activations * dim)
        self.path = _path(model, embed, self._rows, self._num_filled)
        num_weights = sum(p.numel() for p in self._parameters)
        at_once = self._num_filled if self.path == BY_LAYER else _num_rows(num_weights * dim)
        num = self._rows.shape[1]
        self._slices = [slice(start, min(start + at_once, num)) for start in range(0, num, at_once)]
        self._parts: dict[int, list[Part]] = {}  # keyed by the pass's first row

    def _of_pass(self, pass_rows: slice) -> Iterator[Part]:
        """Yield the Jacobians of the rows in `pass_rows`, with their indices.

        If a pass takes another path through the network than synthetic rows, one of its rows is the cause.
        Each row then takes a pass alone, and rows that still differ are computed row by row.
        """
        rows = self._rows[:, pass_rows]
        if self.path == ROW_BY_ROW:
            yield pass_rows, row_by_row(self._parameters, self._embed, rows)
            return
        together = self._by_layer(rows)
        if together is not None:
            yield pass_rows, together
            return
        for place in range(pass_rows.start, pass_rows.stop):
            at = slice(place, place + 1)
            alone = self._by_layer(self._rows[:, at])
            yield at, alone or row_by_row(self._parameters, self._embed, self._rows[:, at])

    def _by_layer(self, inputs: Tensor) -> Rows | None:
        """Return the Jacobians of one pass; None if it takes another path than synthetic rows."""
        try:
            rows = by_layer(self._model, self._parameters, self._embed, _pad_rows(inputs, self._num_filled))
        except NotSeparableError:
            return None
        return rows.at(slice(inputs.shape[1]))

    def measure(self, max_kept: int = 0) -> RowMeasures:
        """Return the measures of all rows; keep Jacobians of up to `max_kept` numbers for `add_products`."""
        by_pass, num_kept = [], 0
        for pass_rows in self._slices:
            parts = list(self._of_pass(pass_rows))
            by_pass.append(summary([rows for _, rows in parts]))
            numbers = sum(share.a.numel() + share.b.numel() for _, rows in parts for share in rows.shares)
            if num_kept + numbers <= max_kept:
                num_kept += numbers
                self._parts[pass_rows.start] = parts
        return RowMeasures(**{name: torch.cat([vars(m)[name] for m in by_pass]) for name in vars(by_pass[0])})

    def add_products(self, total: Tensor, measures: RowMeasures, cotangents: Tensor) -> Tensor:
        """Add Σ_r J_rᵀ c_r over rows r to `total`, with the very Jacobians that `measures` was computed from.

        Jacobians that were not kept are computed again, by the same call on the same pass. A row whose Gram
        matrix then differs in any bit adds nothing, a decision that depends only on this row. A row that is
        not finite also adds nothing.

        Args:
          total: `[num_parameters]`.
          measures: the result of `measure`.
          cotangents: c, float64 `[rows, dim]`; the products are float64, too.

        Returns:
          A mask of the rows that were computed again and differed, `[rows]`.
        """
        views = total.split([p.numel() for p in self._parameters])
        sums: dict[Tensor, Tensor] = dict(zip(self._parameters, views, strict=True))
        differs = torch.zeros_like(measures.finite)
        for pass_rows in self._slices:
            for at, rows in self._parts.get(pass_rows.start) or self._of_pass(pass_rows):
                if pass_rows.start not in self._parts:
                    gram = summary([rows]).gram
                    differs[at] = (gram != measures.gram[at]).flatten(1).any(1)
                good, c = measures.finite[at] & ~differs[at], cotangents[at]
                if not bool(good.all()):  # 0·inf is not 0
                    rows, c = rows.at(good), c[good]
                for share in rows.shares if len(c) else ():
                    sums[share.parameter] += share.combined(c)
        return differs


def _pad_rows(inputs: Tensor, num_rows: int) -> Tensor:
    """Return rows `[1, rows, 1, ...]` filled up with zeros to `num_rows`, always in one layout."""
    padded = inputs.new_zeros(1, num_rows, *inputs.shape[2:])
    padded[:, : inputs.shape[1]] = inputs
    return padded


def _num_rows(numbers: int) -> int:
    """Return how many rows of `numbers` numbers each are in one pass."""
    return max(1, min(_MAX_ROWS, _MAX_PASS_NUMBERS // max(1, numbers)))


def _sizes(model: nn.Module, embed: Embed, inputs: Tensor) -> tuple[int, int]:
    """Return the size of all layers' outputs for one row, and the embedding's dimension."""
    numbers = 0

    def count(module: nn.Module, args: object, output: Tensor) -> None:
        nonlocal numbers
        numbers += output.numel()

    handles = [m.register_forward_hook(count) for m in model.modules() if has_factors(m)]
    try:
        with torch.no_grad():
            z = embed(torch.zeros_like(inputs))
    finally:
        for handle in handles:
            handle.remove()
    if z.shape[:-1] != inputs.shape[:3]:
        raise ConfigError(
            f"embeddings must be [groups, group_size, views, dim], like the inputs; got {list(z.shape)} "
            f"for inputs {list(inputs.shape)}"
        )
    return numbers // inputs.shape[2], z.shape[-1]


_verdicts: Verdicts[str] = Verdicts()


def _path(model: nn.Module, embed: Embed, rows: Tensor, num_rows: int) -> str:
    """Return `BY_LAYER` if synthetic rows show that it is correct for this network; else `ROW_BY_ROW`."""

    def choose_path() -> str:
        wrong = _mismatch(model, embed, rows, num_rows)
        if wrong:
            logger.warning("Jacobians are computed one row at a time (exact, slower): %s", wrong)
        return ROW_BY_ROW if wrong else BY_LAYER

    return _verdicts.of(model, embed, (num_rows, rows.shape[3:], rows.dtype), choose_path)


def _mismatch(model: nn.Module, embed: Embed, like: Tensor, num_rows: int) -> str:
    """Compare both methods on a pass of synthetic rows; return the difference, empty if there is none.

    This finds errors that layer types do not reveal, such as reordered records or dropout. The weights are
    perturbed, so that a zero initialisation hides no branch.
    """
    with perturbed(model) as generator:
        rows = synthetic_inputs(_pad_rows(like[:, :1], num_rows), 1, smallest_vocabulary(model), generator)
        with torch.no_grad():
            first, second = embed(rows), embed(rows)
        if not torch.equal(first, second):
            raise ConfigError(
                "embeddings and gradients come from two passes, which must agree, but this network draws "
                "random numbers. Set its dropout to 0, or call eval()"
            )
        return _compare(model, embed, rows)


def _compare(model: nn.Module, embed: Embed, rows: Tensor) -> str:
    """Return how Jacobians by layer differ from the exact ones at `rows`, in words; empty if they agree."""
    parameters = trainable_parameters(model)
    some = torch.tensor([0, rows.shape[1] // 2, rows.shape[1] - 1], device=rows.device)
    exact = row_by_row(parameters, embed, rows[:, some])
    try:
        rows_by_layer = by_layer(model, parameters, embed, rows)
    except NotSeparableError as error:
        return str(error)
    except ConfigError:
        raise
    except Exception as error:  # a module may break a hook in any way; the exact method uses none
        return f"computing them by layer fails on synthetic inputs ({type(error).__name__}: {error})"
    gram = summary([exact]).gram
    difference = (summary([rows_by_layer.at(some)]).gram - gram).flatten(1).norm(dim=1)
    if bool((difference > _SELF_CHECK_TOLERANCE * gram.flatten(1).norm(dim=1)).any()):
        return "Gram matrices differ from the exact ones on synthetic inputs"
    return ""
