"""Isolated passes of an unreviewed network: on copies of all its state, so no data pass between groups.

An unreviewed network may mix records in a way that no test on synthetic inputs finds: only in large
batches, only for special values, or only by a billionth. If it gets one group at a time, it cannot mix groups
in a pass. What remains is the state that it *keeps* between passes.

*State* is all data that the modules hold: weights, buffers and children, their names, modes, hooks and
attributes, and the plain data of their classes. The modules belong to the network and to every
other network that the objective refers to, such as a target network (`networks_of`).

**Proposition.** Let a pass be a function of the group's inputs and of that state. If the state is the same
before every pass of a step, a group's gradient is a function of only that group and the weights, whatever
the network computes, and so is its clipped contribution. Also, a released network holds nothing that a
pass wrote.

*Proof.* By induction over the groups of a step: in `isolated` each pass runs on copies of weights, buffers
and attributes, which are discarded. Afterwards every module holds the very objects that it held before,
under the same names, and every container of these objects has its earlier contents. Only the optimizer writes
the weights that a step changes, and `refuse_changed_state` compares the rest before anything is released. ∎

Not detected: state outside of the modules, their classes and their attributes, such as a global variable,
a variable of a closure, a file, another process, or an object that cannot be copied. A network that keeps
data there violates the assumption. Nor is a network prevented from drawing random numbers.
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
"""The attributes of every module: parameters, buffers, children, hooks, mode."""
_MAX_FOLLOWED_ITEMS = 256
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLAG = (bool, str, torch.dtype)
_FOLLOWED = (nn.Module, list, tuple, set, dict, *_FLAG)
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def isolated_gradients(
    model: nn.Module, objective: Objective, inputs: GroupInputs
) -> tuple[Tensor, list[Tensor | None]]:
    """Return losses and the gradient of their sum, from a pass that leaves all networks unchanged.

    Args:
      model: the network that `objective` calls.
      objective: maps inputs to losses `[groups]`.
      inputs: the inputs of one group.
    """
    with isolated(model, *networks_of(objective)), torch.enable_grad():
        weights = trainable_parameters(model)  # taken before the pass, which may add parameters
        losses = objective(inputs)
        return losses, list(torch.autograd.grad(losses.sum(), weights, allow_unused=True))


@contextmanager
def isolated(*networks: nn.Module) -> Iterator[None]:
    """Let networks run on copies of all their state; on exit, also after an error, restore the original."""
    modules = list(dict.fromkeys(module for network in networks for module in network.modules()))
    before: list[_ModuleState | _ClassState] = [_ModuleState(module) for module in modules]
    before += [_ClassState(cls) for cls in _classes_of(modules)]
    try:
        _copy_all(modules)
        torch.clear_autocast_cache()
        yield
    finally:
        torch.clear_autocast_cache()
        for each in before:
            each.put_back()


def perturb_weights(*networks: nn.Module) -> torch.Generator:
    """Add noise to all weights, so no zero initialisation hides a branch; return the generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in dict.fromkeys(p for network in networks for p in network.parameters()):
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return generator


@contextmanager
def perturbed(network: nn.Module) -> Iterator[torch.Generator]:
    """Perturb the weights of a network; on exit they and its buffers are restored bit for bit."""
    # `state_dict` is not used, because a model may override it.
    state = [(value, _copy(value)) for value in (*network.parameters(), *network.buffers())]
    try:
        yield perturb_weights(network)
    finally:
        with torch.no_grad():
            for value, before in state:
                value.copy_(before)
        torch.clear_autocast_cache()  # remove casts of the perturbed weights


def _copy_all(modules: list[nn.Module]) -> None:
    """Replace tensors and attributes of modules and classes by copies; a shared object gets one copy."""
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
    """The attributes of a module, and the contents of the containers that every module has."""

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


class _ClassState:
    """The data of a class."""

    def __init__(self, cls: type) -> None:
        self._class, self._data = cls, _data_of(cls)

    def put_back(self) -> None:
        """Restore the class."""
        for name in [n for n in _data_of(self._class) if n not in self._data]:
            delattr(self._class, name)
        for name, value in self._data.items():
            if vars(self._class).get(name) is not value:
                setattr(self._class, name, value)


def networks_of(objective: object) -> list[nn.Module]:
    """Return the networks that an objective refers to by closure, arguments, fields or a global name.

    >>> layer = nn.Linear(2, 1)
    >>> networks_of(lambda inputs: layer(inputs)) == [layer]
    True
    """
    return [each for each in _objects_of(objective) if isinstance(each, nn.Module)]


def settings_of(model: nn.Module, objective: object) -> Hashable:
    """Return a key of the settings on which an objective depends, besides weights, buffers and inputs.

    The key holds the booleans, strings and dtypes that the objective refers to. For every module of its
    networks it holds the class, the mode, which parameters are trained, and the booleans, strings and dtypes
    among its attributes. Not included are numbers, because schedules change them, strings that are attributes
    of other objects, such as a line of a log, and objects that `networks_of` does not reach.

    Args:
      model: a network of the objective.
      objective: an objective of groups, or an embedding.
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
    """Return the modules, booleans, strings and dtypes that an objective refers to, in a fixed order."""
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
            waiting += [g for g in named if isinstance(g, _FOLLOWED) or _is_from_same_module(g, node)]
        elif isinstance(node, MethodType):
            waiting += [node.__self__, node.__func__]
        elif isinstance(node, functools.partial):
            waiting += [node.func, *node.args, *node.keywords.values()]
        elif isinstance(node, list | tuple | set | dict):
            if len(node) <= _MAX_FOLLOWED_ITEMS:  # a larger container may be a table of records
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
    except ValueError:  # the variable has no value yet
        return False


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names in a function's code, also in its comprehensions and inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_from_same_module(value: object, function: FunctionType) -> bool:
    """Return whether `value`, or its class if it is no function, is defined in the module of `function`."""
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
    """Return the classes of modules, except classes of PyTorch and Python."""
    classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__)
    left_out = ("builtins", "torch", "abc", "typing")
    return [cls for cls in classes if cls.__module__.partition(".")[0] not in left_out]


def _data_of(cls: type) -> dict[str, Any]:
    """Return a class's attributes except Python's internal ones."""
    return {name: value for name, value in vars(cls).items() if not name.startswith(("__", "_abc_"))}


def whole_state(network: nn.Module, *, modes: bool = True, weights: bool = False) -> dict[str, Any]:
    """Return the state that a training must not change, by name of module, parameter or buffer.

    Args:
      network: the network; the state includes copies of its buffers.
      modes: whether to include each module's mode, training or evaluation.
      weights: whether to include copies of the parameters' values; False if an optimizer may change them.
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
    """Return a name whose state differs from `before`, a `whole_state` with the same options; or empty."""
    now = whole_state(network, modes=modes, weights=weights)
    for name in dict.fromkeys([*now, *before]):
        if name not in now or name not in before or not _is_same(before[name], now[name]):
            return name
    return ""


_CHANGED = (
    "a step changed network state that only the optimizer may change: a weight, a buffer, a mode, or a part "
    "that is new or missing. It would be released without noise. Keep no such state. This message does not "
    "name the state, because the name may depend on a record: try the loss on public records"
)


@contextmanager
def unwritten(*networks: nn.Module) -> Iterator[None]:
    """Raise on exit if a pass in this context wrote to a network, be it a buffer, a mode or a weight.

    All values are compared bit by bit, because version counters miss writes through `.data`.

    Args:
      networks: the networks that the passes run; the context holds copies of their weights and buffers.

    Raises:
      ConfigError: a pass wrote to a network; raised on exit, with the same text whatever was written.
    """
    inner = {module for network in networks for module in network.modules() if module is not network}
    outer = [network for network in dict.fromkeys(networks) if network not in inner]
    before = [(network, whole_state(network, weights=True)) for network in outer]
    yield
    if any(changed_state(network, state, weights=True) for network, state in before):
        raise ConfigError(_CHANGED)


def refuse_changed_state(network: nn.Module, before: dict[str, Any]) -> None:
    """Raise if anything but the values of parameters has changed in a network since `before`.

    State that depends on the data would be released without noise: a buffer's values, a new buffer, a name,
    a mode.

    Args:
      network: the network after passes of records.
      before: the result of `whole_state` before the training.

    Raises:
      ConfigError: such state has changed; the text is the same whatever has changed.
    """
    if changed_state(network, before):
        raise ConfigError(_CHANGED)


def attributes_of(model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Return copies of every module's own attributes, which are not parameters, buffers or children."""
    own = {id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
    return {
        module: {name: _copy_value(value, own) for name, value in vars(module).items() if name not in _OWN}
        for module in model.modules()
    }


def first_changed(model: nn.Module, before: dict[nn.Module, dict[str, Any]]) -> str:
    """Return an attribute that differs from `before`, a result of `attributes_of`; empty if none does."""
    for prefix, module in model.named_modules():
        then, now = before.get(module, {}), vars(module)
        for name in dict.fromkeys([*then, *(n for n in now if n not in _OWN)]):
            if name not in then or name not in now or not _is_same(then[name], now[name]):
                return f"{prefix}.{name}" if prefix else name
    return ""


def _copy_value(value: Any, twins: dict[int, Any]) -> Any:
    """Return a copy that refers to `twins`, keyed by the originals' ids; the value if it cannot be copied."""
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, Tensor) and id(value) not in twins:  # `deepcopy` refuses tensors with a graph
        twins[id(value)] = _twin(value)
    try:
        return copy.deepcopy(value, twins)
    except Exception:  # a lock, a generator, a handle, or an object that holds one
        if type(value) in (list, tuple, set):
            return type(value)([_copy_value(element, twins) for element in value])
        if type(value) is dict:
            return {key: _copy_value(element, twins) for key, element in value.items()}
        return value


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two values of some state are equal; tensors are compared bit by bit."""
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
    return True  # other objects are not compared, but they are restored
