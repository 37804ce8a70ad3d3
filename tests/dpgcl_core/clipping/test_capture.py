"""Captured passes: every replay is of the inputs and the mask that it is given, and its report stays.

There is no GPU here: a stand-in for a graph runs the pass again, on the memory that a graph would read. That
graphs themselves are exact is a check of `tests/benchmarks/gpu_checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping import capture, one_pass
from dpgcl_core.clipping.capture import CapturedPasses, Pass
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import GroupBatch, GroupReport, map_inputs, num_trainable
from dpgcl_core.errors import ConfigError
from tests.dpgcl_core.clipping import engines
from tests.dpgcl_core.models import TinyEncoder, group_losses_of

NUM_GROUPS, NUM_PASSES = 4, 6


@dataclass
class _Graph:
    """Runs a pass on the memory of the capture, and writes its report where the capture's is."""

    run: Pass
    total: Tensor
    groups: GroupBatch
    report: GroupReport
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        found = self.run(self.total, self.groups)
        for name in ("norms", "losses", "non_finite"):
            getattr(self.report, name).copy_(getattr(found, name))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[_Graph]:
    made: list[_Graph] = []

    def captured(run: Pass, total: Tensor, groups: GroupBatch) -> capture._Captured:
        assert groups.complete is not None
        own = GroupBatch(map_inputs(Tensor.clone, groups.inputs), groups.complete.clone())
        report = run(torch.zeros_like(total), own).mapped(Tensor.clone, own.complete)
        made.append(_Graph(run, total, own, report))
        return capture._Captured(made[-1], own, report)  # type: ignore[arg-type]

    monkeypatch.setattr(capture, "_captured", captured)
    monkeypatch.setattr(capture, "_no_synchronisation", nullcontext)
    return made


def _model() -> TinyEncoder:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return TinyEncoder()


def _views(seed: int, num_groups: int = NUM_GROUPS) -> Tensor:
    return torch.randn(num_groups, 2, 2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


class _Training:
    """One network, one total, and passes that were captured on zeros before anything else."""

    def __init__(self, passes: CapturedPasses | None, num_groups: int = NUM_GROUPS) -> None:
        self.model = _model()
        self.losses = group_losses_of(self.model)
        self.total = torch.zeros(num_trainable(self.model), dtype=torch.float64)
        self.clipper = GroupClipper(l2_clip_norm=0.3, groups_at_once=num_groups, passes=passes)
        if passes is not None:
            with passes.capturing():
                self.take(torch.zeros_like(_views(0, num_groups)), torch.zeros(num_groups, dtype=torch.bool))

    def take(self, views: Tensor, mask: Tensor | None = None) -> tuple[GroupReport, Tensor]:
        self.total.zero_()
        report = self.clipper.add_clipped_sum(self.total, self.model, self.losses, views, mask)
        return report, self.total.clone()


def _reports_and_sums(passes: CapturedPasses | None) -> tuple[list[GroupReport], Tensor]:
    """Passes of other inputs, masks and weights each; the fourth has a group that is not finite."""
    training, reports, sums = _Training(passes), [], []
    for seed in range(NUM_PASSES):
        views = _views(seed, NUM_GROUPS if seed < NUM_PASSES - 1 else 3)  # the last one is filled up
        if seed == 3:
            views[1, 0, 0] = torch.inf
        mask = torch.arange(NUM_GROUPS) % 3 != seed % 3 if seed % 3 and len(views) == NUM_GROUPS else None
        report, total = training.take(views, mask)
        reports.append(report)
        sums.append(total)
        with torch.no_grad():
            for weights in training.model.parameters():
                weights.mul_(1.1)
    return reports, torch.stack(sums)


def test_replays_are_the_passes_themselves(graphs: list[_Graph]) -> None:
    expected, sums = _reports_and_sums(None)
    actual, replayed = _reports_and_sums(CapturedPasses())
    assert [graph.num_replays for graph in graphs] == [NUM_PASSES + 1]
    assert torch.equal(replayed, sums)
    assert not torch.equal(sums[1], sums[2])
    for mine, right in zip(actual, expected, strict=True):
        for name in ("norms", "losses", "non_finite"):
            assert torch.allclose(getattr(mine, name), getattr(right, name), rtol=0, atol=0, equal_nan=True)
    assert bool(actual[3].non_finite[1])
    assert actual[3].paths == expected[3].paths


def test_masked_groups_of_a_capture_are_not_those_of_its_replays(graphs: list[_Graph]) -> None:
    training = _Training(CapturedPasses())
    nothing, everything = torch.zeros(NUM_GROUPS, dtype=torch.bool), torch.ones(NUM_GROUPS, dtype=torch.bool)
    norms = [float(training.take(_views(0), mask)[1].norm()) for mask in (everything, nothing, everything)]
    assert norms[0] == norms[2] > 0
    assert norms[1] == 0
    assert len(graphs) == 1


def test_nothing_is_captured_once_records_are_seen(graphs: list[_Graph]) -> None:
    """What is a replay follows no record."""
    training = _Training(CapturedPasses())
    for num_groups in (NUM_GROUPS, NUM_GROUPS + 1, 2 * NUM_GROUPS):
        for _ in range(3):
            training.take(_views(0, num_groups))
    others = replace(training.clipper, groups_at_once=NUM_GROUPS + 2)
    others.add_clipped_sum(training.total, training.model, group_losses_of(training.model), _views(0, 6))
    assert len(graphs) == 1


def test_another_law_is_another_pass(graphs: list[_Graph]) -> None:
    """A clipper of a smaller C beside one that shares its passes would else contribute the larger one's."""
    training = _Training(CapturedPasses())
    small = replace(training.clipper, l2_clip_norm=0.01)
    training.total.zero_()
    small.add_clipped_sum(training.total, training.model, group_losses_of(training.model), _views(0)[:1])
    assert 0 < float(training.total.norm()) <= 0.01
    before = graphs[0].num_replays
    _Training(None).take(_views(0))
    for law in ({"gamma": 0.01}, {"l2_clip_norm": 0.2}):
        replace(training.clipper, **law).add_clipped_sum(
            training.total, training.model, group_losses_of(training.model), _views(0)
        )
    assert graphs[0].num_replays == before


def test_where_capturing_fails_passes_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, emptied = [], []

    def fails(*_: object) -> None:
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(capture, "_captured", fails)
    monkeypatch.setattr(capture, "_no_synchronisation", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    passes = CapturedPasses()
    _, expected = _reports_and_sums(None)
    _, sums = _reports_and_sums(passes)
    assert torch.equal(sums, expected)
    assert len(tries) == len(emptied) == 1
    assert passes.count == 0


def test_a_pass_that_asks_for_a_number_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refuses() -> Iterator[None]:
        raise RuntimeError("called a synchronizing CUDA operation")
        yield

    monkeypatch.setattr(capture, "_captured", lambda *_: pytest.fail("it would end the capture"))
    monkeypatch.setattr(capture, "_no_synchronisation", refuses)
    passes = CapturedPasses()
    _Training(passes)
    assert passes.count == 0


class _Stream:
    """Torch's stream contexts, without a GPU: the innermost one that was entered is the current stream."""

    current = "default"

    def __init__(self, stream: str, *, fails: bool = False) -> None:
        self._stream, self._fails = stream, fails

    def __enter__(self) -> None:
        self._before, _Stream.current = _Stream.current, self._stream

    def __exit__(self, *_: object) -> None:
        if self._fails:  # as `torch.cuda.graph` does: it ends the capture before it restores the stream
            raise RuntimeError("operation failed due to a previous error during capture")
        _Stream.current = self._before


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_the_stream_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views that another thread makes on it would else be read before they are written."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: _Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", _Stream)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: _Stream("capture", fails=fails))
    taken: list[str] = []

    def run(total: Tensor, groups: GroupBatch) -> GroupReport:
        taken.append(_Stream.current)
        return GroupReport(norms=total, losses=total, non_finite=total > 0)

    given = (torch.zeros(3), GroupBatch(torch.zeros(2, 1), torch.ones(2, dtype=torch.bool)))
    if fails:
        with pytest.raises(RuntimeError, match="during capture"):
            capture._captured(run, *given)
    else:
        capture._captured(run, *given)
    assert taken == ["capture"]
    assert _Stream.current == "default"


def test_masks_are_applied_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture must not wait for a number, and its replays have other masks."""
    training, asked = _Training(None), []
    own = Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda self: asked.append(self.shape) or own(self))
    expected = training.take(_views(0), torch.arange(NUM_GROUPS) != 1)
    assert asked
    asked.clear()
    monkeypatch.setattr(one_pass, "_may_read_values", lambda device: False)
    actual = training.take(_views(0), torch.arange(NUM_GROUPS) != 1)
    assert not asked
    assert torch.equal(actual[1], expected[1])


def test_index_of_a_batch_that_the_network_counts_itself_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CLIP's text towers pick a position of each row so, in every pass."""
    compared: list[object] = []
    own = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *given: compared.append(1) or own(*given))
    model = _picking(lambda rows: torch.arange(rows))
    assert engines.goes_in_one_pass(model, group_losses_of(model), _views(0))
    assert not compared
    moved = _picking(lambda rows: torch.arange(rows).add_(1).remainder_(rows))
    assert not engines.goes_in_one_pass(moved, group_losses_of(moved), _views(0))


def _picking(index_of: Callable[[int], Tensor]) -> nn.Module:
    class Picks(TinyEncoder):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)[index_of(len(images))]

    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Picks()


def test_passes_of_isolated_networks_are_not_replayed() -> None:
    with pytest.raises(ConfigError, match="cannot be replayed"):
        GroupClipper(l2_clip_norm=1.0, passes=CapturedPasses(), isolated=True)
