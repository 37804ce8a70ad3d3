"""Stage 7, the clipped group gradient: one gradient per group, norm at most C, summed in fp32.

It accepts any objective that gives each group one loss of the group's own inputs. Groups are
disjoint and the network mixes no records, so **one** forward and one backward pass of many groups already
hold every group's gradient. The gradients only have to be separated, which `dpgcl_core.clipping.one_pass`
does layer by layer, at about the cost of the ordinary backward pass. `_loop` runs one ordinary backward pass
per group, which is exact and general. It is used for networks with a part unknown to `one_pass`, for groups
that fill a microbatch each, where nothing needs to be separated, and for unreviewed networks (`isolated`).

Guarantee. Every group moves the sum by a vector of norm at most C. The factor is min(1, C(1 − 1e-4)/norm).
The sum uses the same tensors as the norm, and both are computed in float32 or better whatever the precision
of the network, or of the caller (`dpgcl_core.clipping.full_precision`).
The margin covers the error of norms, a share of at most 4e-5 (squares are summed in short runs, then in
float64; ghost norms in float64 throughout), and the rounding of the sum over groups (`one_pass.RUN_GROUPS`).
C is at least `MIN_CLIP_NORM`: squares of smaller numbers would be lost in float32. A group whose gradient is
not finite contributes exactly zero and is masked *before* the product that sums groups, because 0·inf is not
0. No bit of any other group changes.
A group that is marked as not complete is computed like the others and masked in the same way: whatever its
inputs are, it contributes exactly zero.

*Companions.* A group's contribution depends neither on other groups nor on their number. The network, the
shape of a group and the machine decide whether groups share a pass, and how many, M. A pass with fewer groups
is filled up with groups of zeros that are marked as not complete. So every pass has one shape, and the draw
influences no choice of a kernel. **Proposition.** Exchange, add or remove one group of a pass, the
others keeping their places, as the couplings of `dpgcl_core.sampling.groups` allow; then on a device whose
kernels are deterministic no bit of the others' losses, norms, factors and gradients changes. *Sketch.* The
network mixes no records, so each number of a row is computed from that row by an order of operations that the
shapes fix. A group's gradient is a sum over its own rows, in an order that the shapes fix. A masked group
adds exactly zero. What remains is the rounding of the sum over groups, in float32 over runs of at most 16
groups, and in float64 over runs: the margin covers it, whatever M is. In another *place* of
the pass, row or tile, kernels may round differently. The tests allow a contribution 4e-6 C for it in float32,
and 2e-2 C in bfloat16 and float16, where a last digit is 4e-3; in measurements, small built-in networks did
not move at all. The couplings leave the others in their places, so no sensitivity needs this allowance. M is
public, but a caller may let it depend on the free memory after the data are loaded. For a neighbour of
another size M may then differ, and contributions change, by 8e-7 C as measured in float32, within the
same allowance. Set M explicitly to exclude this.
If inputs take a path through the network that one pass cannot separate, each group of that pass is passed
again alone, in the same shape. A group that takes such a path itself gets its own backward pass, a decision
that depends only on that group.

*Automatic clipping* ("Automatic clipping", Bu et al. 2023) uses the factor C(1 − 1e-4)/(norm + γ) instead,
with a public constant γ. Short gradients are lengthened, so C and the learning rate act as one parameter. The
contribution's norm is C(1 − 1e-4)·norm/(norm + γ), again below C whatever the gradient is, and every proof of
a sensitivity needs only this. A factor may reach C/γ here, so it amplifies an absolute error e of a short
gradient's norm, such as a ghost norm's cancellation error: the contribution stays below C as long as e ≤ γ. A
gradient of zero gives zero, because the factor is finite. Without a bound (C = inf) no law has an effect.

*A scale of gradients.* float16 gradients underflow below 6e-8, so an objective may multiply its gradient by a
public constant s, and the clipped sum is divided by s. No loss scaler adapts s to the gradients, because one
record would then change the scale of the next step, and with it every record. Let g' = s·g be the gradient
that arrives. The group is clipped to s·C, so it contributes Clip_{sC}(g')/s, a vector of norm at most C
**whatever** g' is, rounded, overflown and masked or not. If s is a power of two, multiplication and division
by s are exact, so it equals Clip_C(g'/s) bit for bit as long as nothing over- or underflows. Automatic
clipping's γ is scaled with C: sC/(‖g'‖ + sγ)·g'/s = C/(‖g‖ + γ)·g.

Either law may be applied *by parts*, such as the two towers of CLIP: see `dpgcl_core.clipping.parts`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.capture import CapturedPasses, Pass
from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.clipping.isolation import isolated_gradients
from dpgcl_core.clipping.one_pass import per_group_gradients
from dpgcl_core.clipping.parts import ClippingParts, Owners, norms_of, runs_of
from dpgcl_core.clipping.types import (
    GroupBatch,
    GroupInputs,
    GroupReport,
    Objective,
    add_to_sum,
    map_inputs,
    num_trainable,
    trainable_parameters,
)
from dpgcl_core.clipping.verification import Verdicts, Way, Ways, one_pass_mismatch, unsupported_layer
from dpgcl_core.errors import ConfigError, require_choice, require_least
from dpgcl_core.noise.randomness import Draws

logger = logging.getLogger(__name__)


ONE_BY_ONE = "one group at a time"
FLAT, AUTOMATIC = "flat", "automatic"
GAMMA = 0.01
"""γ of automatic clipping, public and the same for every training."""
MIN_CLIP_NORM = 1e-10
"""Smallest C. A number below 1.1e-19 has no exact square in float32. If the squares of 10^12 such numbers
are all lost, the lost sum is less than 1e-5 of the square of this norm."""
_MARGIN = 1 - 1e-4
_MAX_GRADIENT_NUMBERS = 2**26  # 256 MiB of per-group gradients at a time,
_MAX_GRADIENT_NUMBERS_PER_WEIGHT = 2  # or as much memory as the float64 sum takes, if that is more,
_GPU_BYTES_PER_GRADIENT_NUMBER = 256  # or 1/64 of a GPU's memory, which takes small passes no faster
_LOOP_FROM_VIEWS = 96  # on a CPU a backward pass of this many images is as fast alone as among others,
_LOOP_FROM_VIEWS_OF_MANY_WEIGHTS = 48  # and here it also saves the memory of the other groups' gradients
_MANY_WEIGHTS = 2**20
_VIEWS_AT_ONCE = 96  # views of a pass if `groups_at_once` is None


@dataclass(frozen=True, kw_only=True)
class GroupClipper:
    """Per-group clipping to `l2_clip_norm`.

    Attributes:
      l2_clip_norm: C; inf for the plain gradient (non-private).
      gamma: γ of automatic clipping, see `gamma_of`; None for flat clipping.
      parts: the parts that are clipped separately; None clips the gradient as a whole.
      groups_at_once: M, the number of groups of every pass, or less if their gradients do not fit into
        memory. It is public, so never the number that was drawn. None: as many groups as have 96 views.
      isolated: whether to pass the groups one at a time, each on copies of weights and buffers, for networks
        that may mix records or store data of them (`dpgcl_core.clipping.isolation`).
      gradient_scale: the public power of two by which the objective multiplies its gradient.
      passes: the captured GPU passes to replay, for one objective of one network; None replays no pass.

    Raises:
      ConfigError: a field is outside its range, or `passes` is set for an isolated network.
    """

    l2_clip_norm: float
    gamma: float | None = None
    parts: ClippingParts | None = None
    groups_at_once: int | None = None
    isolated: bool = False
    gradient_scale: float = 1.0
    passes: CapturedPasses | None = field(default=None, compare=False, repr=False)
    whole_batch: ClassVar[bool] = False
    needs_draws: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.passes is not None and self.isolated:
            raise ConfigError("the passes of isolated networks cannot be replayed: leave passes out")
        scale = self.gradient_scale
        if not (0 < scale < math.inf and math.frexp(scale)[0] == 0.5):
            raise ConfigError(f"gradient_scale must be a power of two; got {scale}")
        check_clip_norm(self.l2_clip_norm * min(1.0, scale))
        require_least(self, 1, "groups_at_once")
        check_gamma(self.gamma and self.gamma * scale)

    def add_clipped_sum(
        self,
        total: Tensor,
        model: nn.Module,
        objective: Objective,
        inputs: GroupInputs,
        complete: Tensor | None = None,
        draws: Draws | None = None,
    ) -> GroupReport:
        """Add Σ Clip_C(∇L_G) over the groups of `inputs` to `total`, in place.

        Any partition of a batch into microbatches of whole groups gives the same sum.
        With groups of one record this is per-record DP-SGD.

        Args:
          total: float64 `[num_trainable(model)]`, in the order of `trainable_parameters`.
          model: the network that `objective` calls; it must not mix records.
          objective: maps inputs `[groups, ...]` to losses `[groups]`, one scalar per group that depends
            only on that group's inputs. Every layer of `model` should have the rows of `inputs` as its
            leading axis, group by group; if a layer does not, the groups are passed one at a time. If the
            model has an attribute `num_towers`, a layer may see 1/`num_towers` of the views.
          inputs: `[groups, group_size, views, ...]`, at least one group; or a tuple of such tensors.
          complete: bool `[groups]`, which groups contribute; None for all.
          draws: not used, because nothing is released besides the sum.

        Returns:
          The groups' norms and losses, **private-only**: for diagnosis, not for release.

        Raises:
          ConfigError: a clipping part holds no trainable parameter of this model.
        """
        network = _Network(model, trainable_parameters(model), objective)
        groups = GroupBatch(inputs, None if complete is None else complete.to(total.device))
        with full_precision(total.device.type):
            if self.gradient_scale == 1:
                return self._add(total, network, groups)
            total.mul_(self.gradient_scale)  # exact in float64; in place, because captured passes add to it
            report = self._add(total, network, groups)
            total.div_(self.gradient_scale)
            return replace(report, norms=report.norms / self.gradient_scale)

    def _add(self, total: Tensor, network: _Network, groups: GroupBatch) -> GroupReport:
        """Add the clipped sum of gradients multiplied by `gradient_scale`, in passes of one shape."""
        owners = None if self.parts is None else self.parts.owners(network.model)
        if math.isinf(self.l2_clip_norm):
            return _plain(total, network, groups)
        gamma = None if self.gamma is None else self.gamma * self.gradient_scale
        law = ClippingLaw(self.l2_clip_norm * self.gradient_scale, gamma, owners)
        if self.isolated:
            return _loop(total, network, groups, law, is_isolated=True)
        loop = partial(_loop, network=network, law=law)
        max_groups = self.groups_at_once or max(1, _VIEWS_AT_ONCE // max(1, groups.num_views))
        if max_groups == 1 or not _goes_in_one_pass(network, groups, owners):
            return loop(total, groups=groups)

        def run(total: Tensor, groups: GroupBatch) -> GroupReport:
            return _one_pass(total, network, groups, law)

        take = run if self.passes is None else partial(self.passes.take, run, kind=(id(network.model), law))
        size, reports = _groups_of_a_pass(max_groups, network, groups), []
        for start in range(0, len(groups), size):
            chunk = groups.part(start, min(start + size, len(groups)))
            try:
                reports.append(_in_fixed_shape(take, size, total, chunk))
            except NotSeparableError:  # some of these groups took another path through the network
                for index in range(len(chunk)):  # each group alone, in that shape if its own path allows it
                    group = chunk.part(index, index + 1)
                    try:
                        reports.append(_in_fixed_shape(run, size, total, group))
                    except NotSeparableError:
                        reports.append(loop(total, groups=group))
        return _join_reports(reports)


@dataclass(frozen=True)
class ClippingLaw:
    """The rule that limits the norm of a group's gradient, or of each part of the gradient.

    Attributes:
      l2_clip_norm: C, finite.
      gamma: γ of automatic clipping; None for flat clipping.
      owners: the index of each trainable parameter's part; each of m parts is clipped to C/√m. None clips
        the gradient as a whole.
    """

    l2_clip_norm: float
    gamma: float | None = None
    owners: Owners | None = None

    def factors(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Return each norm's factor, both `[parts, groups]`, and a mask `[groups]` of contributing groups."""
        factor, counts = clip_factor(norms, self.l2_clip_norm / math.sqrt(len(norms)), self.gamma)
        if len(norms) == 1:
            return factor, counts[0]
        counted = counts.all(0) & torch.isfinite(_whole(norms))
        return torch.where(counted, factor, 0.0), counted

    def report(
        self,
        norms: Tensor,
        finite: Tensor,
        losses: Tensor,
        paths: Mapping[str, str],
        complete: Tensor | None,
    ) -> GroupReport:
        """Return the report of groups from their norms `[parts, groups]`, factor masks and losses."""
        if complete is not None:  # inputs of an incomplete group are placeholders: norm and loss are 0
            norms, losses = torch.where(complete, norms, 0.0), torch.where(complete, losses, 0.0)
            finite = finite | ~complete
        bound = self.l2_clip_norm / math.sqrt(len(norms))
        return GroupReport(
            norms=_whole(norms),
            losses=losses,
            non_finite=~finite,
            paths=paths,
            part_ratios=None if len(norms) == 1 else (norms / bound).T,
            complete=complete,
        )


@dataclass(frozen=True, eq=False)
class _Network:
    """A model, its trained parameters, and the objective that returns the loss of each group."""

    model: nn.Module
    parameters: list[nn.Parameter]
    objective: Objective

    @property
    def view_divisors(self) -> tuple[int, ...]:
        """The divisors of the number of views that a layer may see: 1, and the model's number of towers."""
        return (1, int(getattr(self.model, "num_towers", 1)))

    def gradient_alone(
        self, groups: GroupBatch, index: int, *, is_isolated: bool, is_among_copies: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss `[1]` and the flat gradient of one group, from its own backward pass.

        Args:
          groups: the groups that contain it.
          index: its index among them.
          is_isolated: whether the pass runs on copies of the network's state.
          is_among_copies: whether the group is passed at its index among copies of itself.
        """
        torch.clear_autocast_cache()
        group = groups.part(index, index + 1).inputs
        if is_isolated:
            loss, gradients = isolated_gradients(self.model, self.objective, group)
            return loss, flat_gradient(gradients, self.parameters)
        if is_among_copies:
            copies = map_inputs(lambda leaf: leaf.expand(len(groups), *leaf.shape[1:]).clone(), group)
            loss = self.objective(copies)[index : index + 1]
        else:
            loss = self.objective(group)
        return loss, flat_gradient(self.gradients(loss), self.parameters)

    def gradients(self, losses: Tensor) -> list[Tensor | None]:
        """Return the gradients of the sum of losses, one per parameter."""
        return list(torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True))


def _in_fixed_shape(run: Pass, num_groups: int, total: Tensor, groups: GroupBatch) -> GroupReport:
    """Run a pass of exactly `num_groups` groups; the groups that fill it up contribute nothing."""
    if len(groups) == num_groups:
        return run(total, groups)
    report = run(total, groups.filled_up(num_groups, total.device))
    return report.mapped(lambda rows: rows[: len(groups)], groups.complete)


def _join_reports(reports: list[GroupReport]) -> GroupReport:
    """Return one report on the groups of all reports, in order."""
    if len(reports) == 1:
        return reports[0]
    ratios = [report.part_ratios for report in reports if report.part_ratios is not None]
    masks = [report.complete for report in reports if report.complete is not None]
    return GroupReport(
        norms=torch.cat([report.norms for report in reports]),
        losses=torch.cat([report.losses for report in reports]),
        non_finite=torch.cat([report.non_finite for report in reports]),
        paths=reports[-1].paths,
        part_ratios=torch.cat(ratios) if ratios else None,
        complete=torch.cat(masks) if masks else None,
    )


def _plain(total: Tensor, network: _Network, groups: GroupBatch) -> GroupReport:
    """Add the plain gradient of all complete groups at once, for runs without clipping."""
    complete = groups.complete
    if complete is not None and not complete.all():  # nothing is secret here: shapes may depend on the data
        return _plain_of_some(total, network, groups.inputs, complete)
    torch.clear_autocast_cache()
    losses = network.objective(groups.inputs)
    flat = flat_gradient(network.gradients(losses), network.parameters)
    finite = torch.isfinite(flat).all()
    flat = torch.where(finite, flat, torch.zeros_like(flat))
    add_to_sum(total, flat)
    return GroupReport(
        norms=torch.full_like(losses.detach(), math.nan),
        losses=losses.detach(),
        non_finite=(~finite).expand(len(losses)),
        complete=complete,
    )


def _plain_of_some(total: Tensor, network: _Network, inputs: GroupInputs, complete: Tensor) -> GroupReport:
    """Add the plain gradient of only the complete groups; report zeros for the others."""
    report = GroupReport(
        norms=torch.zeros(len(complete), device=total.device),
        losses=torch.zeros(len(complete), device=total.device),
        non_finite=torch.zeros_like(complete),
        complete=complete,
    )
    if complete.any():
        taken = map_inputs(lambda leaf: leaf[complete.to(leaf.device)], inputs)
        of_taken = _plain(total, network, GroupBatch(taken))
        report.norms[complete], report.losses[complete] = of_taken.norms, of_taken.losses.float()
        report.non_finite[complete] = of_taken.non_finite
    return report


def _loop(
    total: Tensor,
    network: _Network,
    groups: GroupBatch,
    law: ClippingLaw,
    *,
    is_isolated: bool = False,
    is_among_copies: bool = False,
) -> GroupReport:
    """Run one backward pass per group, see `_Network.gradient_alone`: exact for any network."""
    norms, losses, finites = [], [], []
    runs = runs_of(network.parameters, law.owners)
    for index in range(len(groups)):
        loss, flat = network.gradient_alone(
            groups, index, is_isolated=is_isolated, is_among_copies=is_among_copies
        )
        norm = norms_of(flat, runs)
        factor, finite = law.factors(norm)
        counts = finite if groups.complete is None else finite & groups.complete[index : index + 1]
        flat.masked_fill_(~counts, 0.0)
        for part, run in runs:
            add_to_sum(total[run], flat[run].mul_(factor[part, 0]))
        del flat  # before the next group's gradient is allocated
        norms.append(norm)
        losses.append(loss.detach())
        finites.append(finite)
    paths = {"": ONE_BY_ONE}
    return law.report(torch.cat(norms, 1), torch.cat(finites), torch.cat(losses), paths, groups.complete)


def _whole(norms: Tensor) -> Tensor:
    return norms[0] if len(norms) == 1 else norms.double().square().sum(0).sqrt().float()


def flat_gradient(gradients: list[Tensor | None], parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return gradients as one float32 vector in the order of `parameters`, zero for a missing gradient.

    `gradients` is emptied along the way, so that memory never holds two copies of all gradients.
    """
    num_parameters = sum(p.numel() for p in parameters)
    flat = torch.empty(num_parameters, dtype=torch.float32, device=parameters[0].device)
    offset = flat.numel()
    for parameter in reversed(parameters):
        offset -= parameter.numel()
        gradient = gradients.pop()
        part = flat[offset : offset + parameter.numel()].view_as(parameter)
        part.zero_() if gradient is None else part.copy_(gradient)
    return flat


def check_clip_norm(l2_clip_norm: float) -> None:
    """Raise ConfigError unless C is at least `MIN_CLIP_NORM`."""
    if not l2_clip_norm >= MIN_CLIP_NORM:
        raise ConfigError(
            f"l2_clip_norm must be at least {MIN_CLIP_NORM:g} (float32 loses the squares of smaller "
            f"numbers); got {l2_clip_norm}"
        )


def gamma_of(clipping: str) -> float | None:
    """Return γ of a clipping law by its name; None for flat clipping.

    Raises:
      ConfigError: there is no such law.

    >>> gamma_of("automatic"), gamma_of("flat")
    (0.01, None)
    """
    require_choice("clipping", clipping, (FLAT, AUTOMATIC))
    return GAMMA if clipping == AUTOMATIC else None


def check_gamma(gamma: float | None) -> None:
    """Raise ConfigError unless γ is None, or positive and finite."""
    if gamma is not None and not (gamma > 0 and math.isfinite(gamma)):
        raise ConfigError(f"gamma must be positive and finite, or None for flat clipping; got {gamma}")


def clip_factor(
    norm: Tensor, l2_clip_norm: float, gamma: float | None = None, *, tiny: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the factors by which gradients with these norms are clipped; every clipper uses this function.

    Args:
      norm: norms, not negative, in a tensor of any shape.
      l2_clip_norm: C, finite.
      gamma: γ of automatic clipping; None for flat clipping.
      tiny: the smallest usable factor and norm; by default the smallest normal number of the norms' dtype.

    Returns:
      The factors, and a mask of the gradients that contribute. The factor is zero and the gradient masked if
      its norm is not finite, or so large that the factor would be below `tiny`.
    """
    tiny = torch.finfo(norm.dtype).tiny if tiny is None else tiny
    if gamma is None:
        factor = (l2_clip_norm * _MARGIN / norm.clamp_min(tiny)).clamp_max(1.0)
    else:
        factor = l2_clip_norm * _MARGIN / (norm + gamma)
    counts = torch.isfinite(norm) & (factor >= tiny)
    return torch.where(counts, factor, torch.zeros_like(factor)), counts


def _one_pass(total: Tensor, network: _Network, groups: GroupBatch, law: ClippingLaw) -> GroupReport:
    """Run one forward and one backward pass and separate every layer's gradient by group."""
    torch.clear_autocast_cache()
    gradients = per_group_gradients(
        network.model,
        network.parameters,
        lambda: network.objective(groups.inputs),
        num_groups=len(groups),
        num_rows=frozenset(
            leaf.shape[:3].numel() // divisor for leaf in groups.leaves for divisor in network.view_divisors
        ),
        owners=law.owners,
    )
    norms = gradients.norms()
    factor, finite = law.factors(norms)
    if groups.complete is not None:
        factor = torch.where(groups.complete, factor, 0.0)
    gradients.check()
    gradients.add_weighted(total, network.parameters, factor)
    _gradient_numbers.setdefault(network.model, {})[groups.group_shape] = gradients.numbers_per_group
    return law.report(norms, finite, gradients.losses, gradients.paths, groups.complete)


_gradient_numbers: WeakKeyDictionary[nn.Module, dict[tuple[torch.Size, ...], int]] = WeakKeyDictionary()
_verdicts: Verdicts[bool] = Verdicts()


def _groups_of_a_pass(max_groups: int, network: _Network, groups: GroupBatch) -> int:
    """Return the number of groups of a pass: `max_groups`, or fewer if their gradients do not fit."""
    model, parameters = network.model, network.parameters
    if max_groups * num_trainable(model) <= _gradient_number_limit(parameters):
        return max_groups
    numbers = _gradient_numbers.get(model, {}).get(groups.group_shape)
    if numbers is None:  # measured on groups of zeros, so that no real group is alone in its pass
        scratch = torch.zeros(num_trainable(model), device=groups.leaves[0].device)
        blank = groups.part(0, 0).filled_up(2, scratch.device).inputs
        try:
            _one_pass(scratch, network, GroupBatch(blank), ClippingLaw(1.0))
        except NotSeparableError:
            return 1
        numbers = _gradient_numbers[model][groups.group_shape]
    return _equal_shares(max_groups, parameters, numbers)


def _gradient_number_limit(parameters: list[nn.Parameter]) -> int:
    """Return the most numbers of per-group gradients that a pass may hold in memory."""
    of_weights = _MAX_GRADIENT_NUMBERS_PER_WEIGHT * sum(weight.numel() for weight in parameters)
    return max(_MAX_GRADIENT_NUMBERS, of_weights, _gpu_memory(parameters) // _GPU_BYTES_PER_GRADIENT_NUMBER)


def _gpu_memory(parameters: list[nn.Parameter]) -> int:
    """Return the bytes of memory, used or not, of the GPU that parameters are on; 0 on a CPU."""
    device = parameters[0].device
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _equal_shares(max_groups: int, parameters: list[nn.Parameter], numbers_per_group: int) -> int:
    """Split `max_groups` into the fewest passes of equal size whose gradients fit; return that size."""
    fits = max(1, _gradient_number_limit(parameters) // max(1, numbers_per_group))
    return math.ceil(max_groups / math.ceil(max_groups / fits))


def _goes_in_one_pass(network: _Network, groups: GroupBatch, owners: Owners | None) -> bool:
    """Return whether `_one_pass` is exact for this model and faster for groups of this shape.

    The answer also depends on the clipping parts: an error that is negligible in the norm of the whole
    gradient may be large in the norm of a part.
    """
    model, device = network.model, groups.leaves[0].device
    if device.type == "cpu" and groups.num_views >= _loop_from_views(model):
        return False

    def is_exact() -> bool:
        reason = unsupported_layer(model) or one_pass_mismatch(model, _ways(network, owners), groups.inputs)
        if reason:
            logger.warning("computing gradients one group at a time (exact but slower): %s", reason)
        return not reason

    dtypes = tuple(leaf.dtype for leaf in groups.leaves)
    return _verdicts.of(model, network.objective, (owners, groups.group_shape, dtypes, device), is_exact)


def _loop_from_views(model: nn.Module) -> int:
    return _LOOP_FROM_VIEWS if num_trainable(model) < _MANY_WEIGHTS else _LOOP_FROM_VIEWS_OF_MANY_WEIGHTS


def _ways(network: _Network, owners: Owners | None) -> Ways:
    """Return a function that computes clipped sum and report in a given way, for the self-check; C is 1."""
    law = ClippingLaw(1.0, None, owners)

    def run(inputs: GroupInputs, way: Way) -> tuple[Tensor, GroupReport]:
        groups = GroupBatch(inputs)
        total = torch.zeros(num_trainable(network.model), device=groups.leaves[0].device)
        if way is Way.ONE_PASS:
            return total, _one_pass(total, network, groups, law)
        return total, _loop(total, network, groups, law, is_among_copies=way is Way.AMONG_COPIES)

    return run
