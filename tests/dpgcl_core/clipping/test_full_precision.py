"""Every rule's passes run at the engine's precision, whatever the caller has set for the process.

What is compared are the settings that the network sees, for what they change depends on the processor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import GroupClipper, num_trainable
from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.losses.info_nce import two_view_group_loss
from tests.dpgcl_core.method_oracles import CASES, TRAINING, mechanism_of, rule_sum, target_of
from tests.dpgcl_core.models import TinyEncoder, group_losses_of

DIM = 4  # of TinyEncoder's embeddings
_BACKENDS: Any = torch.backends
_OPERATIONS = {
    "cuda matmul": _BACKENDS.cuda.matmul,
    "cudnn conv": _BACKENDS.cudnn.conv,
    "cudnn rnn": _BACKENDS.cudnn.rnn,
    "mkldnn matmul": _BACKENDS.mkldnn.matmul,
    "mkldnn conv": _BACKENDS.mkldnn.conv,
    "mkldnn rnn": _BACKENDS.mkldnn.rnn,
}
State = dict[str, object]
EXACT: State = {name: "ieee" for name in _OPERATIONS} | {"matmul": "highest", "autocast": False}


def state() -> State:
    try:
        matmul = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = "several"
    precisions = {name: operation.fp32_precision for name, operation in _OPERATIONS.items()}
    return precisions | {"matmul": matmul, "autocast": torch.is_autocast_enabled("cpu")}


@contextmanager
def caller(*, by_library: bool = False) -> Iterator[State]:
    """A caller that wants everything in low precision; yields what it has set."""
    before = state()
    torch.set_float32_matmul_precision("medium")
    _BACKENDS.mkldnn.conv.fp32_precision = "bf16"
    _BACKENDS.cudnn.conv.fp32_precision = "tf32"
    if by_library:  # several precisions of one operation, for which PyTorch has no single name
        _BACKENDS.cuda.matmul.fp32_precision = "ieee"
        _BACKENDS.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield state()
    finally:
        torch.set_float32_matmul_precision("highest")
        _restore(before)


def _restore(before: State) -> None:
    for name, operation in _OPERATIONS.items():
        operation.fp32_precision = before[name]


def _model() -> TinyEncoder:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return TinyEncoder()


def _noting(model: nn.Module, seen: list[tuple[str, State]]) -> None:
    """Writes down what every layer finds in its forward pass, and in the backward pass behind it."""

    def forward(module: nn.Module, args: object, output: Tensor) -> None:
        seen.append(("forward", state()))
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append(("backward", state())))

    for layer in model.modules():
        if not list(layer.children()):
            layer.register_forward_hook(forward)


def _sum(name: str, model: nn.Module) -> Tensor:
    groups, size, _ = CASES[name].shape
    views = torch.randn(*CASES[name].shape, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    draws = np.random.default_rng(5)
    normals = [draws.standard_normal(count) for count in CASES[name].normals(groups * size, DIM)]
    mechanism = mechanism_of(name, records=groups * size, l2_clip_norm=0.02)
    return rule_sum(mechanism, model, views, normals, target_of(model))


@pytest.mark.parametrize("name", TRAINING)
def test_network_sees_the_engines_precision_in_both_passes_of_every_rule(name: str) -> None:
    model, seen = _model(), []  # type: ignore[var-annotated]
    _noting(model, seen)
    with caller() as wanted:
        _sum(name, model)
        assert state() == wanted
    assert {direction for direction, _ in seen} == {"forward", "backward"}
    assert all(found == EXACT for _, found in seen)


@pytest.mark.parametrize("name", TRAINING)
def test_callers_precision_changes_no_bit_of_a_rules_sum(name: str) -> None:
    expected = _sum(name, _model())
    with caller():
        assert torch.equal(_sum(name, _model()), expected)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("l2_clip_norm", [0.1, math.inf])
def test_network_sees_the_engines_precision_on_every_way_of_the_clipper(
    l2_clip_norm: float, num_groups: int
) -> None:
    """In one pass, one group at a time, and without clipping."""
    model, seen = _model(), []  # type: ignore[var-annotated]
    _noting(model, seen)
    views = torch.randn(num_groups, 2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with caller():
        total = torch.zeros(num_trainable(model))
        GroupClipper(l2_clip_norm=l2_clip_norm).add_clipped_sum(total, model, group_losses_of(model), views)
    assert {direction for direction, _ in seen} == {"forward", "backward"}
    assert all(found == EXACT for _, found in seen)


@pytest.mark.parametrize("by_library", [False, True])
def test_callers_precision_is_back_after_an_exception(by_library: bool) -> None:
    with caller(by_library=by_library) as wanted:
        with pytest.raises(pytest.fail.Exception, match="inside"), full_precision("cpu"):
            pytest.fail("inside" if state() == EXACT else f"{state()}")
        assert state() == wanted


def test_precision_that_was_inherited_still_is() -> None:
    """A value written where there was none would outlive the caller's next choice for the library."""
    before = state()
    with full_precision("cpu"):
        pass
    assert state() == before
    try:
        _BACKENDS.mkldnn.conv.fp32_precision = "none"
        _BACKENDS.fp32_precision = "tf32"
        assert _BACKENDS.mkldnn.conv.fp32_precision == "tf32"
        with full_precision("cpu"):
            assert _BACKENDS.mkldnn.conv.fp32_precision == "ieee"
        _BACKENDS.fp32_precision = "none"
        assert _BACKENDS.mkldnn.conv.fp32_precision == "none"
    finally:
        _BACKENDS.fp32_precision = "none"
        _restore(before)


def test_networks_own_autocast_holds_in_its_forward_pass_alone() -> None:
    model, seen, dtypes = _model(), [], []  # type: ignore[var-annotated]
    model.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))

    def losses(views: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = model(views.flatten(0, 2)).float()
        seen.append(state())
        return two_view_group_loss(embeddings.unflatten(0, views.shape[:3]), temperature=0.2)

    views = torch.randn(3, 2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(num_trainable(model))
    with caller():
        GroupClipper(l2_clip_norm=0.1).add_clipped_sum(total, model, losses, views)
    assert set(dtypes) == {torch.bfloat16}
    assert all(found == EXACT for found in seen)


def test_a_second_thread_restores_nothing_under_the_first_ones_pass() -> None:
    entered, seen = threading.Event(), []

    def second() -> None:
        entered.set()
        with full_precision("cpu"):
            seen.append(state())

    with caller():
        before = state()
        with full_precision("cpu"):
            thread = threading.Thread(target=second)
            thread.start()
            entered.wait()
            thread.join(timeout=0.2)  # a thread that did not wait would be through
            assert not seen
            assert torch.get_float32_matmul_precision() == "highest"
        thread.join()
        assert len(seen) == 1
        assert state() == before


@pytest.mark.parametrize("isolated", [False, True])
def test_first_pass_of_a_model_with_an_autocast_of_its_own_uses_its_own_weights(isolated: bool) -> None:
    """Not the casts of those that the self-check before it had perturbed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def loss(groups: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(groups.flatten(0, 2))
        return output.float().square().unflatten(0, groups.shape[:3]).flatten(1).sum(1)

    groups, sums = torch.randn(4, 2, 2, 8), []
    clipper = GroupClipper(l2_clip_norm=1e6, groups_at_once=4, isolated=isolated)
    for _ in range(2):
        sums.append(torch.zeros(num_trainable(model), dtype=torch.float64))
        clipper.add_clipped_sum(sums[-1], model, loss, groups)
    assert float((sums[0] - sums[1]).norm() / sums[1].norm()) < 1e-3
