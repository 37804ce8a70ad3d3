"""A foreign network's passes: on copies of weights and buffers, so that nothing goes from group to group.

A network that nobody here has read may mix records in a way that no test on made-up inputs finds: in large
batches only, for special values only, by a billionth only. Taken one group at a time it has no other group to
mix with, in a pass; what is left is what it *keeps* between passes.

**Proposition.** Let a pass be a function of the group's inputs and of the network's weights, buffers and
attributes. If all of these are the same before every pass of a step, a group's gradient is a function of
that group and of the weights alone, whatever the network computes, and so is its clipped contribution.

*Proof.* By induction over the groups of a step: `isolated_gradients` hands each pass fresh copies of weights
and buffers, which are thrown away, and puts the modules' attributes back afterwards. ∎

What is not seen: state outside of the modules and their attributes, such as a global variable, a closure, a
file, another process, or an object that cannot be copied. A network that keeps data there breaks the
assumption. Nor is a network kept from drawing at random.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpgcl_core.clipping.types import GroupInputs, Objective

_OWN = frozenset(vars(nn.Module()))
"""What every module has: parameters, buffers, children, hooks."""
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class _Call(nn.Module):
    """The objective as a module above the network, for `functional_call`."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, inputs: GroupInputs) -> Tensor:
        return self._objective(inputs)


def isolated_gradients(
    model: nn.Module, objective: Objective, inputs: GroupInputs
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return losses and the gradient of their sum, of a pass that leaves nothing behind in the network.

    Args:
      model: the network that `objective` calls.
      objective: inputs to losses `[groups]`.
      inputs: of one group.
    """
    call = _Call(model, objective)
    state = {name: _copy(p).requires_grad_(p.requires_grad) for name, p in call.named_parameters()}
    buffers = {name: _copy(buffer) for name, buffer in call.named_buffers()}
    wanted = [p for p in state.values() if p.requires_grad]
    with kept_attributes(model), torch.enable_grad():
        losses = functional_call(call, state | buffers, (inputs,))
        return losses, torch.autograd.grad(losses.sum(), wanted, allow_unused=True)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Put the attributes of all modules back on exit, whatever a pass made of them."""
    before = attributes_of(model)
    try:
        yield
    finally:
        own = _references(model)
        for module in list(model.modules()):
            values = {
                name: value if isinstance(value, _CONSTANT) else _copied(value, own)
                for name, value in before.get(module, {}).items()
            }
            for name in [n for n in vars(module) if n not in _OWN and n not in values]:
                del vars(module)[name]
            vars(module).update(values)


def attributes_of(model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Return copies of the attributes of every module, besides parameters, buffers and children."""
    own = _references(model)
    return {
        module: {name: _copied(value, own) for name, value in vars(module).items() if name not in _OWN}
        for module in model.modules()
    }


def first_changed(model: nn.Module, before: dict[nn.Module, dict[str, Any]]) -> str:
    """Return the name of an attribute that is another than in `before`; empty if none is seen to be."""
    for prefix, module in model.named_modules():
        then, now = before.get(module, {}), vars(module)
        for name in dict.fromkeys([*then, *(n for n in now if n not in _OWN)]):
            if name not in then or name not in now or not _same(then[name], now[name]):
                return f"{prefix}.{name}" if prefix else name
    return ""


def _references(model: nn.Module) -> dict[int, Any]:
    """What a copy of an attribute shall refer to and not copy: modules, parameters and buffers."""
    return {id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}


def _copied(value: Any, own: dict[int, Any]) -> Any:
    """A copy of an attribute; the attribute itself where it cannot be copied."""
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, Tensor) and id(value) not in own:  # `deepcopy` refuses those with a graph
        return _copy(value).requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value, dict(own))
    except Exception:  # a lock, a generator, a handle
        return value


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, Tensor):
        return before.shape == now.shape and before.dtype == now.dtype and torch.equal(before, now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_same(value, now[key]) for key, value in before.items())
    if isinstance(before, list | tuple):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, (*_CONSTANT, set, frozenset)):
        return bool(before == now)
    return True  # of other objects nothing is known; they are put back all the same
