"""Stage 7's self-check: does one pass for all groups give the same as one pass per group?"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.layers import rule_of
from dpgcl_core.clipping.one_pass import as_layers_run
from dpgcl_core.clipping.types import GroupInputs, GroupReport

_TOLERANCE = 1e-3


class BothWays(Protocol):
    """Computes clipped sum and report of some inputs, in one pass or one group at a time."""

    def __call__(self, inputs: GroupInputs, *, in_one_pass: bool) -> tuple[Tensor, GroupReport]: ...


def unsupported_layer(model: nn.Module) -> str:
    """Return which layer has settings that one pass does not support; empty if none has."""
    for name, module in model.named_modules():
        rule = rule_of(module)
        if rule is not None and any(p.requires_grad for p in module.parameters(recurse=False)):
            reason = rule.refuses(module)
            if reason:
                return f"layer {name!r} ({type(module).__name__}): {reason}"
    return ""


def one_pass_mismatch(model: nn.Module, run: BothWays, inputs: GroupInputs) -> str:
    """Compare both paths on synthetic inputs; return how they differ, empty if they do not.

    It finds errors that layer types do not reveal: a layer whose weights are used outside its `forward`, or
    that reorders records. The weights are perturbed for the comparison, so that a zero initialisation hides
    no branch, and restored bit for bit; two numbers of groups are tried, so that a layer's leading axis does
    not fit by chance; the synthetic records differ in level and contrast, so that they take different paths
    through the network. Normalisations of a known class run as in the exact loop: that their own rules give
    the same is a matter of the class, not of the network.
    """
    leaves = (inputs,) if isinstance(inputs, Tensor) else inputs
    # Not `state_dict`, which a model may override.
    state = [(value, value.detach().clone()) for value in (*model.parameters(), *model.buffers())]
    generator = torch.Generator().manual_seed(0)
    vocabulary = min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise.to(parameter))
        for num_groups in (2, 3):
            synthetic = tuple(_synthetic(each, num_groups, vocabulary, generator) for each in leaves)
            wrong = _compare(model, run, synthetic[0] if isinstance(inputs, Tensor) else synthetic)
            if wrong:
                return wrong
    finally:
        with torch.no_grad():
            for value, before in state:
                value.copy_(before)
        torch.clear_autocast_cache()  # of casts of the perturbed weights
    return ""


def _synthetic(like: Tensor, num_groups: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    shape = (num_groups, *like.shape[1:])
    if not like.is_floating_point():
        return torch.randint(vocabulary, shape, generator=generator).to(like)
    rows = (*shape[:3], *(1 for _ in shape[3:]))
    level, contrast = (torch.rand(rows, generator=generator) for _ in range(2))
    return ((2 * level - 1) + contrast * (2 * torch.rand(shape, generator=generator) - 1)).to(like)


def _compare(model: nn.Module, run: BothWays, inputs: GroupInputs) -> str:
    """Return how one pass differs from the exact loop on these inputs; empty if it does not."""
    expected, loop = run(inputs, in_one_pass=False)
    try:
        with as_layers_run():
            actual, fast = run(inputs, in_one_pass=True)
    except NotSeparableError as error:
        return str(error)
    except Exception as error:  # whatever a module does to a hook; the loop needs none
        return f"one pass fails on synthetic inputs ({type(error).__name__}: {error})"
    if not torch.allclose(fast.norms, loop.norms, rtol=_TOLERANCE):
        return "norms of one pass differ from exact ones on synthetic inputs"
    if _parts_differ(fast.part_ratios, loop.part_ratios):
        return "norms of clipping parts in one pass differ from exact ones on synthetic inputs"
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    allowed = 0.01 * _TOLERANCE * expected.norm()  # for a parameter with a negligible gradient
    for part, exact in zip(torch.split(actual, sizes), torch.split(expected, sizes), strict=True):
        if (part - exact).norm() > _TOLERANCE * exact.norm() + allowed:
            return "gradients of one pass differ from exact ones on synthetic inputs"
    return ""


def _parts_differ(actual: Tensor | None, exact: Tensor | None) -> bool:
    if actual is None or exact is None:
        return actual is not exact
    allowed = 0.01 * _TOLERANCE * exact.norm(dim=1, keepdim=True)  # rounding of the whole gradient
    return bool(((actual - exact).abs() > _TOLERANCE * exact + allowed).any())
