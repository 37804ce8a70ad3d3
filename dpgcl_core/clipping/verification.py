"""Stage 7's self-check, which tests that one pass for all groups gives the same as one pass per group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.full_precision import low_precision_off
from dpgcl_core.clipping.isolation import perturbed, settings_of
from dpgcl_core.clipping.layers import rule_of
from dpgcl_core.clipping.one_pass import as_layers_run
from dpgcl_core.clipping.types import GroupInputs, GroupReport, map_inputs


class Way(Enum):
    """The way in which the groups' gradients are computed: in one pass, or by one backward pass per group.

    `AMONG_COPIES` keeps each group's place in a pass of the same shape, whose kernels round like those of the
    one pass. `ALONE` runs a separate pass for each group, whose kernels may round differently.
    """

    ONE_PASS = auto()
    AMONG_COPIES = auto()
    ALONE = auto()


_TOLERANCES = {Way.AMONG_COPIES: 1e-3, Way.ALONE: 5e-2}
"""The allowed difference between one pass and each other way. If a ReLU's input is zero except for rounding,
two correct gradients differ by 1e-3 and more. A ResNet, with millions of such inputs, often has one.
A mistake is as large as a group's gradient."""


_Verdict = TypeVar("_Verdict")
_MOST_VERDICTS = 64
"""The most verdicts of one model, so that a flag that changes at every step does not fill the memory."""


class Verdicts(Generic[_Verdict]):
    """Verdicts of checks, each stored for one model, function and settings.

    The check is repeated for another function of the same model, for a function that was created again, and
    if `settings_of` changes: the layers, a module's mode or flags, or a flag that the function refers to.
    """

    def __init__(self) -> None:
        self._of_model: weakref.WeakKeyDictionary[
            nn.Module, dict[Hashable, tuple[weakref.ref[object], _Verdict]]
        ] = weakref.WeakKeyDictionary()

    def of(
        self, model: nn.Module, function: object, key: Hashable, check: Callable[[], _Verdict]
    ) -> _Verdict:
        """Return the stored verdict on `function` of `model`; call `check` if there is none.

        Args:
          model: the network that `function` calls.
          function: an objective or embedding.
          key: other inputs of the check, such as shapes.
          check: returns the verdict.
        """
        try:
            reference = weakref.ref(function)
        except TypeError:  # no verdict is kept: another function could later have the same id
            return check()
        verdicts = self._of_model.setdefault(model, {})
        key = (id(function), settings_of(model, function), key)
        if key not in verdicts or verdicts[key][0]() is not function:
            verdicts[key] = (reference, check())
        while len(verdicts) > _MOST_VERDICTS:
            verdicts.pop(next(iter(verdicts)))  # the oldest
        return verdicts[key][1]


class Ways(Protocol):
    """Computes the clipped sum and the report of inputs in one of the ways."""

    def __call__(self, inputs: GroupInputs, way: Way) -> tuple[Tensor, GroupReport]: ...


def unsupported_layer(model: nn.Module) -> str:
    """Return the first layer that one pass does not support, with the reason; empty if it supports all."""
    for name, module in model.named_modules():
        rule = rule_of(module)
        if rule is not None and any(p.requires_grad for p in module.parameters(recurse=False)):
            reason = rule.unsupported_reason(module)
            if reason:
                return f"layer {name!r} ({type(module).__name__}): {reason}"
    return ""


def one_pass_mismatch(model: nn.Module, run: Ways, inputs: GroupInputs) -> str:
    """Compare one pass with the other ways on synthetic inputs; return the difference, empty if none.

    This finds errors that layer types do not reveal: a layer whose weights are used outside its `forward`, or
    that reorders records. The weights are perturbed for the comparison, so that a zero initialisation hides
    no branch, and restored bit for bit. Two numbers of groups are tried, so that a layer's leading axis does
    not fit by chance. The synthetic records differ in level and contrast, so that they take different paths
    through the network. Normalisations of a known class run as in the exact passes per group, because the
    correctness of their layer rules depends only on the class, not on the network.
    """
    vocabulary = smallest_vocabulary(model)
    with perturbed(model) as generator:
        for num_groups in (2, 3):
            for size in dict.fromkeys((vocabulary, 2)):  # whole numbers may be labels of fewer classes
                fill = partial(synthetic_inputs, num_groups=num_groups, vocabulary=size, generator=generator)
                try:
                    with low_precision_off():  # low precision's rounding is above the tolerances
                        wrong = _compare(model, run, map_inputs(fill, inputs))
                    break
                except Exception as error:
                    wrong = f"the loss fails on synthetic inputs ({type(error).__name__}: {error})"
            if wrong:
                return wrong
    return ""


def smallest_vocabulary(model: nn.Module) -> int:
    """Return the size of the model's smallest embedding table; 2 if there is none."""
    return min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)


def synthetic_inputs(like: Tensor, num_groups: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return synthetic inputs `[num_groups, ...]` like `like`, whose records differ in level and contrast."""
    shape = (num_groups, *like.shape[1:])
    if not like.is_floating_point():
        return torch.randint(vocabulary, shape, generator=generator).to(like)
    rows = (*shape[:3], *(1 for _ in shape[3:]))
    level, contrast = (torch.rand(rows, generator=generator) for _ in range(2))
    return ((2 * level - 1) + contrast * (2 * torch.rand(shape, generator=generator) - 1)).to(like)


def _compare(model: nn.Module, run: Ways, inputs: GroupInputs) -> str:
    """Return how one pass differs from exact passes per group on these inputs, in words; empty if not."""
    exact = run(inputs, Way.ALONE)
    try:
        with as_layers_run():
            actual = run(inputs, Way.ONE_PASS)
        wrong = _differences(model, actual, exact, _TOLERANCES[Way.ALONE])
        if wrong:
            return wrong
        del exact  # free it: a sum is as large as all weights
        return _differences(model, actual, run(inputs, Way.AMONG_COPIES), _TOLERANCES[Way.AMONG_COPIES])
    except NotSeparableError as error:
        return str(error)
    except Exception as error:  # a module may break a hook in any way; the other ways use no hook
        return f"the one-pass computation fails on synthetic inputs ({type(error).__name__}: {error})"


def _differences(
    model: nn.Module, actual: tuple[Tensor, GroupReport], exact: tuple[Tensor, GroupReport], tolerance: float
) -> str:
    """Return the first difference of (sum, report) above `tolerance`, in words; empty if there is none."""
    (total, fast), (exact_total, loop) = actual, exact
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    if not torch.allclose(fast.norms, loop.norms, rtol=tolerance):
        return "the one-pass norms differ from the exact norms on synthetic inputs"
    if _parts_differ(fast.part_ratios, loop.part_ratios, tolerance):
        return "the one-pass norms of clipping parts differ from the exact norms on synthetic inputs"
    if _sums_differ(total.split(sizes), exact_total.split(sizes), tolerance * exact_total.norm(), tolerance):
        return "the one-pass gradients differ from the exact gradients on synthetic inputs"
    return ""


def _sums_differ(
    actual: Sequence[Tensor], exact: Sequence[Tensor], whole_tolerance: Tensor, tolerance: float
) -> bool:
    allowed = 0.01 * whole_tolerance  # for a parameter with a negligible gradient
    return any(
        bool((a - e).norm() > tolerance * e.norm() + allowed) for a, e in zip(actual, exact, strict=True)
    )


def _parts_differ(actual: Tensor | None, exact: Tensor | None, tolerance: float) -> bool:
    if actual is None or exact is None:
        return actual is not exact
    allowed = 0.01 * tolerance * exact.norm(dim=1, keepdim=True)  # rounding of the whole gradient
    return bool(((actual - exact).abs() > tolerance * exact + allowed).any())
