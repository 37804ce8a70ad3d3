"""A foreign network's passes: on copies of all its state, so that nothing goes from group to group.

A network that nobody here has read may mix records in a way that no test on made-up inputs finds: in large
batches only, for special values only, by a billionth only. Taken one group at a time it has no other group to
mix with, in a pass; what is left is what it *keeps* between passes.

*State* is all that the modules hold: weights, buffers and children, their names, modes, hooks and attributes,
and what their classes hold as plain data. The modules are those of the network, and those of every other
network that the objective refers to, such as a target network (`networks_of`).

**Proposition.** Let a pass be a function of the group's inputs and of that state. If the state is the same
before every pass of a step, a group's gradient is a function of that group and of the weights alone, whatever
the network computes, and so is its clipped contribution. Nor does a released network hold anything that a
pass wrote.

*Proof.* By induction over the groups of a step: in `isolated` each pass runs on copies of weights, buffers
and attributes, which are thrown away, and afterwards every module holds the very objects that it held before,
under the same names, and every container of them its earlier contents. The weights that a step changes are
written by the optimizer alone, and `refuse_changed_state` compares the rest before anything is released. ∎

What is not seen: state outside of the modules, their classes and their attributes, such as a global variable,
a variable of a closure, a file, another process, or an object that cannot be copied. A network that keeps
data there breaks the assumption. Nor is a network kept from drawing at random.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import GroupInputs, Objective, trainable_parameters
from dpgcl_core.errors import ConfigError

_OWN = frozenset(vars(nn.Module()))
"""What every module has: parameters, buffers, children, hooks, mode."""
_MANY = 256
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLAG = (bool, str, torch.dtype)
_FOLLOWED = (nn.Module, list, tuple, set, dict, *_FLAG)
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def isolated_gradients(
    model: nn.Module, objective: Objective, inputs: GroupInputs
) -> tuple[Tensor, list[Tensor | None]]:
    """Return losses and the gradient of their sum, of a pass that leaves nothing behind in any network.

    Args:
      model: the network that `objective` calls.
      objective: inputs to losses `[groups]`.
      inputs: of one group.
    """
    with isolated(model, *networks_of(objective)), torch.enable_grad():
        weights = trainable_parameters(model)  # of this moment: a pass may add some
        losses = objective(inputs)
        return losses, list(torch.autograd.grad(losses.sum(), weights, allow_unused=True))


@contextmanager
def isolated(*networks: nn.Module) -> Iterator[None]:
    """Let networks run on copies of all their state; on exit they are what they were, whatever happened."""
    modules = list(dict.fromkeys(module for network in networks for module in network.modules()))
    before: list[_ModuleState | _ClassHeld] = [_ModuleState(module) for module in modules]
    before += [_ClassHeld(cls) for cls in _classes_of(modules)]
    try:
        _copy_all(modules)
        torch.clear_autocast_cache()
        yield
    finally:
        torch.clear_autocast_cache()
        for each in before:
            each.put_back()


def perturb_weights(*networks: nn.Module) -> torch.Generator:
    """Move all weights of networks, lest a zero initialisation hide a branch; return a seeded generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in dict.fromkeys(p for network in networks for p in network.parameters()):
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return generator


@contextmanager
def perturbed(network: nn.Module) -> Iterator[torch.Generator]:
    """Perturb the weights of a network meanwhile; they and its buffers are restored bit for bit."""
    # Not `state_dict`, which a model may override.
    state = [(value, _copy(value)) for value in (*network.parameters(), *network.buffers())]
    try:
        yield perturb_weights(network)
    finally:
        with torch.no_grad():
            for value, before in state:
                value.copy_(before)
        torch.clear_autocast_cache()  # of casts of the perturbed weights


def _copy_all(modules: list[nn.Module]) -> None:
    """Give modules and their classes copies of their objects; a shared object has one copy."""
    twins: dict[int, Any] = {id(module): module for module in modules}
    for module in modules:
        containers: list[dict[str, Any]] = [vars(module)[name] for name in ("_parameters", "_buffers")]
        for container in containers:
            for name, tensor in container.items():
                if tensor is not None:
                    container[name] = twins[id(tensor)] if id(tensor) in twins else _twin(tensor)
                    twins[id(tensor)] = container[name]
    for module in modules:
        for name in [n for n in vars(module) if n not in _OWN]:
            vars(module)[name] = _copy_value(vars(module)[name], twins)
    for cls in _classes_of(modules):
        for name, value in _data_of(cls).items():
            if isinstance(value, list | dict | set | Tensor):
                setattr(cls, name, _copy_value(value, twins))


class _ModuleState:
    """The objects of a module, and the contents of the containers that every module has."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._class, self._values = module, type(module), dict(vars(module))
        self._contents = {
            name: copy.copy(value)
            for name, value in self._values.items()
            if name in _OWN and isinstance(value, dict | set)
        }

    def put_back(self) -> None:
        """Restore the module."""
        self._module.__class__ = self._class
        vars(self._module).clear()
        vars(self._module).update(self._values)
        for name, contents in self._contents.items():
            self._values[name].clear()
            self._values[name].update(contents)


class _ClassHeld:
    """What a class holds."""

    def __init__(self, cls: type) -> None:
        self._class, self._data = cls, _data_of(cls)

    def put_back(self) -> None:
        """Make the class what it was."""
        for name in [n for n in _data_of(self._class) if n not in self._data]:
            delattr(self._class, name)
        for name, value in self._data.items():
            if vars(self._class).get(name) is not value:
                setattr(self._class, name, value)


def networks_of(objective: object) -> list[nn.Module]:
    """Return the networks that an objective refers to: by closure, arguments, fields or a global name.

    >>> layer = nn.Linear(2, 1)
    >>> networks_of(lambda inputs: layer(inputs)) == [layer]
    True
    """
    return [each for each in _objects_of(objective) if isinstance(each, nn.Module)]


def settings_of(model: nn.Module, objective: object) -> Hashable:
    """Return a key of what decides how an objective computes, besides weights, buffers and inputs.

    It holds the flags and names that the objective refers to, and of every module of its networks the class,
    the mode, which parameters are trained, and the flags and names among its attributes. Not seen: numbers,
    which schedules change, names that are attributes of other objects, such as a line of a log, and what
    `networks_of` does not reach.

    Args:
      model: a network of the objective.
      objective: of groups, or an embedding.
    """
    objects = _objects_of(objective)
    networks = [model, *(each for each in objects if isinstance(each, nn.Module))]
    modules = dict.fromkeys(module for network in networks for module in network.modules())
    return (
        tuple(each for each in objects if isinstance(each, _FLAG)),
        tuple(_settings_of_module(module) for module in modules),
    )


def _settings_of_module(module: nn.Module) -> Hashable:
    requires_grad = tuple(p is not None and p.requires_grad for p in module._parameters.values())
    flags = tuple(
        (n, value) for n, value in vars(module).items() if n not in _OWN and isinstance(value, _FLAG)
    )
    return id(module), type(module), module.training, requires_grad, flags


def _objects_of(objective: object) -> list[object]:
    """Return the modules, flags and names that an objective refers to, in a fixed order."""
    objects: list[object] = []
    visited: dict[int, object] = {}
    waiting: list[object] = [objective]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _FLAG):
            objects.append(node)
        if id(node) in visited or isinstance(node, (*_CONSTANT, Tensor, type)):
            continue
        visited[id(node)] = node
        if isinstance(node, nn.Module):
            objects.append(node)
        elif isinstance(node, FunctionType):
            waiting += [cell.cell_contents for cell in node.__closure__ or () if _is_full(cell)]
            waiting += [*(node.__defaults__ or ()), *(node.__kwdefaults__ or {}).values()]
            named = [node.__globals__.get(name) for name in _names_in(node.__code__)]
            waiting += [g for g in named if isinstance(g, _FOLLOWED) or _stands_beside(g, node)]
        elif isinstance(node, MethodType):
            waiting += [node.__self__, node.__func__]
        elif isinstance(node, functools.partial):
            waiting += [node.func, *node.args, *node.keywords.values()]
        elif isinstance(node, list | tuple | set | dict):
            if len(node) <= _MANY:  # not a table of records
                waiting += node.values() if isinstance(node, dict) else node
        elif type(node).__module__ != "builtins":
            attributes = getattr(node, "__dict__", {}).values()
            waiting += [value for value in attributes if is_dataclass(node) or not isinstance(value, str)]
            waiting += [*(vars(cls).get("__call__") for cls in type(node).__mro__)]
            waiting += [getattr(node, item.name, None) for item in fields(node)] if is_dataclass(node) else []
    return objects


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names in a function's code, those of comprehensions and inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _stands_beside(value: object, function: FunctionType) -> bool:
    """Return whether a function, or the class of an object, is of the function's own file."""
    kind = value if isinstance(value, FunctionType) else type(value)
    return kind.__module__ == function.__module__


def _twin(tensor: Tensor) -> Tensor:
    twin = _copy(tensor)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _classes_of(modules: list[nn.Module]) -> list[type]:
    """The classes of modules, those of PyTorch and Python left out."""
    classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__)
    left_out = ("builtins", "torch", "abc", "typing")
    return [cls for cls in classes if cls.__module__.partition(".")[0] not in left_out]


def _data_of(cls: type) -> dict[str, Any]:
    """A class's attributes but those that Python keeps for itself."""
    return {name: value for name, value in vars(cls).items() if not name.startswith(("__", "_abc_"))}


def whole_state(network: nn.Module, *, modes: bool = True, weights: bool = False) -> dict[str, Any]:
    """Return what a training must leave as it is, by name: modules, parameters and buffers that there are.

    Args:
      network: of whose buffers copies are returned, too.
      modes: whether a module's mode, training or not, counts.
      weights: whether the values of parameters count: not while an optimizer is at work.
    """
    state: dict[str, Any] = {}
    for prefix, module in network.named_modules(remove_duplicate=False):
        state[prefix or type(network).__name__] = [type(module), modes and module.training]
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                form = [parameter.shape, parameter.dtype, parameter.requires_grad]
                state[start + name] = [*form, _copy(parameter)] if weights else form
        for name, buffer in module._buffers.items():
            if buffer is not None:
                state[start + name] = [name in module._non_persistent_buffers_set, _copy(buffer)]
    return state


def changed_state(
    network: nn.Module, before: dict[str, Any], *, modes: bool = True, weights: bool = False
) -> str:
    """Return the name of something that is another than in `before`, of `whole_state`; empty if none."""
    now = whole_state(network, modes=modes, weights=weights)
    for name in dict.fromkeys([*now, *before]):
        if name not in now or name not in before or not _is_same(before[name], now[name]):
            return name
    return ""


_CHANGED = (
    "a network changed in a step what the optimizer alone may change: a weight, a buffer, a mode, a part "
    "that is new or gone; it would be released without noise. Keep no such state. What it was is not told, "
    "for that may follow a record: try the loss on public records"
)


@contextmanager
def unwritten(*networks: nn.Module) -> Iterator[None]:
    """Refuse passes that write to networks: to weights, too, which a layer may rescale as it is used.

    All is compared bit by bit, for version counters miss what is written through `.data`.

    Args:
      networks: that the passes run; copies of their weights and buffers are held meanwhile.

    Raises:
      ConfigError: on exit, in one text whatever was written.
    """
    inner = {module for network in networks for module in network.modules() if module is not network}
    outer = [network for network in dict.fromkeys(networks) if network not in inner]
    before = [(network, whole_state(network, weights=True)) for network in outer]
    yield
    if any(changed_state(network, state, weights=True) for network, state in before):
        raise ConfigError(_CHANGED)


def refuse_changed_state(network: nn.Module, before: dict[str, Any]) -> None:
    """Refuse a network of which more than trained weights has changed since `before`.

    What follows the data would be released without noise: a buffer's values, a new one, a name, a mode.

    Args:
      network: after passes of records.
      before: of `whole_state`, before the training.

    Raises:
      ConfigError: in one text whatever has changed.
    """
    if changed_state(network, before):
        raise ConfigError(_CHANGED)


def attributes_of(model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Return copies of the attributes of every module, besides parameters, buffers and children."""
    own = {id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
    return {
        module: {name: _copy_value(value, own) for name, value in vars(module).items() if name not in _OWN}
        for module in model.modules()
    }


def first_changed(model: nn.Module, before: dict[nn.Module, dict[str, Any]]) -> str:
    """Return the name of an attribute that is another than in `before`; empty if none is seen to be."""
    for prefix, module in model.named_modules():
        then, now = before.get(module, {}), vars(module)
        for name in dict.fromkeys([*then, *(n for n in now if n not in _OWN)]):
            if name not in then or name not in now or not _is_same(then[name], now[name]):
                return f"{prefix}.{name}" if prefix else name
    return ""


def _copy_value(value: Any, twins: dict[int, Any]) -> Any:
    """Return a copy that refers to `twins`, by the ids of originals; the value if it cannot be copied."""
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, Tensor) and id(value) not in twins:  # `deepcopy` refuses those with a graph
        twins[id(value)] = _twin(value)
    try:
        return copy.deepcopy(value, twins)
    except Exception:  # a lock, a generator, a handle, or something that holds one
        if type(value) in (list, tuple, set):
            return type(value)([_copy_value(element, twins) for element in value])
        if type(value) is dict:
            return {key: _copy_value(element, twins) for key, element in value.items()}
        return value


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, Tensor):
        if before.shape != now.shape or before.dtype != now.dtype:
            return False
        if before.is_complex():
            return _is_same(torch.view_as_real(before), torch.view_as_real(now))
        return torch.equal(*(tensor.detach().view(_WORDS[tensor.itemsize]) for tensor in (before, now)))
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_is_same(value, now[key]) for key, value in before.items())
    if isinstance(before, list | tuple):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, (*_CONSTANT, set, frozenset, type)):
        return bool(before == now)
    return True  # other objects are not compared; they are put back all the same
