"""The training loop: laws that must hold whatever the network and the data."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpgcl_core import private_step
from dpgcl_core.clipping import capture
from dpgcl_core.clipping.types import GroupBatch, GroupReport, num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.noise import chunked_draw
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import SecretRandomness
from dpgcl_core.private_step import PrivateStep, make_ahead
from dpgcl_core.release.metrics import METRICS, Release
from dpgcl_core.sampling.poisson import PoissonSampler
from dpgcl_core.sampling.slots import SampledGroups
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import (
    Elsewhere,
    add_clipped_sum,
    drawn_groups,
    inputs_of_rows,
    make_config,
    make_data,
)
from trainers.config.training import (
    EvaluationConfig,
    NetworkConfig,
    OptimizerConfig,
    PerformanceConfig,
)
from trainers.tasks import image_task
from trainers.training import step
from trainers.training.loop import train
from trainers.training.observation import Observer
from trainers.training.step import Training, prepare


def _weights(encoder: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainable_parameters(encoder)])


def _run(**changes: object):  # type: ignore[no-untyped-def]
    return prepare(make_config(**changes), make_data(), SingleWorker())


def _draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.empty(0, dtype=np.int64)
    monkeypatch.setattr(PoissonSampler, "sample", lambda self, num_records, generator: nothing)
    none = DrawnGroups.all_complete(np.empty((0, 4), dtype=np.int64))
    monkeypatch.setattr(SampledGroups, "draw", lambda *_, **__: none)


def test_training_reports_epsilon_of_all_steps() -> None:
    result = train(make_config(), make_data())
    assert result.metrics["epsilon"] == pytest.approx(make_config().mechanism.epsilon())
    assert result.metrics["num_steps_done"] == 6
    assert result.metrics["num_steps_charged"] == 6


@pytest.mark.ci
def test_training_is_random_by_default_and_reproducible_only_when_seeded() -> None:
    secret = [_weights(train(make_config(), make_data()).encoder) for _ in range(2)]
    seeded = [_weights(train(make_config(seeded_non_private=True), make_data()).encoder) for _ in range(2)]
    assert not torch.equal(*secret)
    assert torch.equal(*seeded)


def test_seeded_training_has_no_epsilon_and_no_guarantee() -> None:
    config = make_config(seeded_non_private=True)
    assert config.guarantee_label == "none"
    assert "epsilon" not in train(config, make_data()).metrics


def test_public_seed_does_not_reach_sampling_permutation_or_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, float]] = []
    original = SecretRandomness.generator

    def spy(self: SecretRandomness, step: int, purpose: str) -> np.random.Generator:
        generator = original(self, step, purpose)
        drawn.append((purpose, float(original(self, step, purpose).random())))
        return generator

    monkeypatch.setattr(SecretRandomness, "generator", spy)
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        train(make_config(public_seed=7), make_data())
    assert {purpose for purpose, _ in drawn} == {"sampling", "permutation", "noise"}
    assert len({value for _, value in drawn}) == len(drawn) == 2 * 6 * 3


@pytest.mark.ci
def test_microbatch_size_changes_nothing() -> None:
    results = []
    for size in (6, 24, 4096, None):
        performance = PerformanceConfig(max_views_per_microbatch=size, device="cpu")
        config = make_config(seeded_non_private=True, performance=performance)
        results.append(_weights(train(config, make_data()).encoder))
    for other in results[1:]:
        assert float((other - results[0]).norm() / results[0].norm()) < 1e-5


@pytest.mark.ci
def test_prefetched_views_change_no_bit() -> None:
    results = []
    for prefetch in (False, True):
        performance = PerformanceConfig(max_views_per_microbatch=24, device="cpu", prefetch=prefetch)
        config = make_config(seeded_non_private=True, performance=performance)
        results.append(_weights(train(config, make_data()).encoder))
    assert torch.equal(*results)


def test_prefetch_holds_one_microbatch_beside_the_current_one() -> None:
    beside = ThreadPoolExecutor(1)
    made: list[int] = []

    def make(part: int) -> torch.Tensor:
        made.append(part)
        return torch.tensor(part)

    for used, views in enumerate(make_ahead(make, range(8), beside)):
        beside.submit(lambda: None).result()
        assert int(views) == used
        assert len(made) <= used + 2
    assert made == list(range(8))


@pytest.mark.parametrize("prefetch", [False, True])
def test_failure_to_make_views_ends_the_training_as_it_is(
    prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **named: object) -> torch.Tensor:
        raise KeyError("a record")

    monkeypatch.setattr(image_task, "image_views", fail)
    performance = PerformanceConfig(max_views_per_microbatch=24, device="cpu", prefetch=prefetch)
    with pytest.raises(KeyError, match="a record"):
        train(make_config(performance=performance, sampling_prob=1.0), make_data())


def test_noise_drawn_in_threads_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    results, threads = [], set()
    original = GaussianNoise.draw

    def spy(self: GaussianNoise, n: int, generator: np.random.Generator, gpu: None) -> torch.Tensor:
        threads.add(threading.current_thread() is threading.main_thread())
        return original(self, n, generator, gpu)

    monkeypatch.setattr(GaussianNoise, "draw", spy)
    monkeypatch.setattr(chunked_draw, "PART", 1000)
    for beside in (None, ThreadPoolExecutor(2)):
        add = partial(chunked_draw.add_in_parts, executor=beside)
        monkeypatch.setattr(private_step, "add_in_parts", lambda *args, add=add, **_: add(*args))
        results.append(_weights(train(make_config(seeded_non_private=True), make_data()).encoder))
    assert threads == {True, False}
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"network": NetworkConfig(name="tests.trainers.training.test_loop:my_backbone")}, False),
        (
            {
                "network": NetworkConfig(name="small_cnn", predictor=True),
                "method": "byol_groups",
                "num_augmentations": 0,
            },
            False,
        ),
    ],
)
def test_passes_are_replayed_where_they_are_the_same_at_every_step(
    changes: dict[str, Any], expected: bool
) -> None:
    """Not where foreign code or a second network changes between steps."""
    config = make_config(**changes)
    assert step.repeats_passes(config, torch.device("cuda")) is expected
    assert not step.repeats_passes(config, torch.device("cpu"))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_passes_are_captured_before_a_record_is_seen_and_replayed_in_every_step(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a graph, there being no GPU: it counts, and runs the pass."""
    order: list[str] = []

    class Replayed:
        def __init__(self, run: Callable[..., GroupReport], total: torch.Tensor) -> None:
            self.run, self.total = run, total

        def replayed(self, groups: GroupBatch) -> GroupReport:
            order.append("replay")
            return self.run(self.total, groups)

    def captured(run: Callable[..., GroupReport], total: torch.Tensor, groups: GroupBatch) -> Replayed:
        order.append("capture")
        assert not groups.leaves[0].any()
        assert groups.complete is not None
        assert not groups.complete.any()
        return Replayed(run, total)

    monkeypatch.setattr(capture, "_captured_if_possible", captured)
    monkeypatch.setattr(step, "repeats_passes", lambda *_: True)
    own = Training.inputs
    monkeypatch.setattr(
        Training, "inputs", lambda *given, **named: order.append("records") or own(*given, **named)
    )
    network = NetworkConfig(name="small_cnn", embedding_dim=8, precision=precision)
    run = _run(sampling_prob=1.0, network=network, evaluation=EvaluationConfig(also_untrained=False))
    assert order == ["capture", "replay"]
    assert float(run.private_step.total.norm()) == 0  # groups of zeros contribute nothing
    run.num_steps_done = 1  # the first one makes a pass without augmentation besides
    run.take_step()
    assert order[2:] == ["records", "replay"] * (len(order[2:]) // 2)
    assert len(order) > 4


def test_beside_a_gpu_the_noise_is_drawn_in_a_thread_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_draw, "PART", 1000)
    run = _run(seeded_non_private=True)
    law = run.config.mechanism.noise()
    start_noise, length = run.private_step._start_noise, num_trainable(run.encoder)
    on_the_cpu = start_noise(0, law, run.private_step.total)
    threads = set()
    original = GaussianNoise.draw

    def spy(self: GaussianNoise, n: int, generator: np.random.Generator, gpu: None) -> torch.Tensor:
        threads.add(threading.current_thread() is threading.main_thread())
        return original(self, n, generator, gpu)

    monkeypatch.setattr(GaussianNoise, "draw", spy)
    beside = start_noise(0, law, Elsewhere("cuda", run))
    found = [beside(part) for part in reversed(chunked_draw.parts_of(length))]
    assert threads == {False}
    expected = [on_the_cpu(part) for part in chunked_draw.parts_of(length)]
    assert len(found) > 1
    assert torch.equal(torch.cat(found[::-1]), torch.cat(expected))


@pytest.mark.parametrize(("name", "rate"), [("adam", 1e-3), ("adamw", 1e-3), ("sgd", 1e-3)])
def test_gradient_reaches_its_own_weights_whatever_their_memory_format(name: str, rate: float) -> None:
    """Weights of convolutions are channels-last, the flat gradient is not."""
    run = _run(optimizer=OptimizerConfig(name=name, learning_rate=rate, momentum=0.0))
    before = _weights(run.encoder)
    gradient = torch.zeros(len(before))
    gradient[1::7] = torch.randn(len(gradient[1::7])).sign()
    run.update(gradient)
    moved = _weights(run.encoder) - before
    assert torch.equal(moved.sign(), -gradient.sign())


def test_no_noise_and_infinite_clip_is_plain_gradient_descent() -> None:
    run = _run(noise_multiplier=0.0, l2_clip_norm=math.inf, seeded_non_private=True, sampling_prob=1.0)
    captured: list[torch.Tensor] = []
    run.optimizer.step = lambda: captured.append(
        torch.cat([p.grad.flatten() for p in run.encoder.parameters()])
    )
    run.take_step()
    run.num_steps_done = 0  # the inputs of the step that was made
    groups = drawn_groups(run)
    views = inputs_of_rows(run, groups.rows, 1)
    losses = [
        two_view_group_loss(
            run.encoder(view.flatten(0, 1)).unflatten(0, view.shape[:2])[None], temperature=0.2
        )
        for view in views
    ]
    expected = torch.autograd.grad(torch.cat(losses).sum(), trainable_parameters(run.encoder))
    flat = torch.cat([g.flatten() for g in expected]) / run.config.mechanism.divisor
    assert float((captured[0] - flat).norm() / flat.norm()) < 1e-5


@pytest.mark.parametrize(("sampling", "times_clip_norm"), [("groups", 1), ("records", 2)])
def test_noise_reaches_the_weights_with_the_mechanisms_std(
    sampling: str, times_clip_norm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _draw_nothing(monkeypatch)  # noise alone
    run = _run(noise_multiplier=2.0, l2_clip_norm=0.5, sampling=sampling)
    captured: list[torch.Tensor] = []
    run.optimizer.step = lambda: captured.append(
        torch.cat([p.grad.flatten() for p in run.encoder.parameters()])
    )
    run.take_step()
    noise = captured[0] * run.config.mechanism.divisor
    expected = 2.0 * (times_clip_norm * 0.5)
    error = expected / math.sqrt(2 * len(noise))
    assert abs(float(noise.std()) - expected) < 5 * error
    assert abs(float(noise.std()) - expected / 2) > 5 * error


def test_empty_draws_are_steps_with_noise_and_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    _draw_nothing(monkeypatch)
    config = make_config()
    before = _weights(prepare(config, make_data(), SingleWorker()).encoder)
    result = train(config, make_data())
    assert result.metrics["num_steps_charged"] == 6
    assert not torch.equal(before, _weights(result.encoder))


def test_divisor_does_not_follow_the_realised_number_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(sampling_prob=1.0, evaluation=EvaluationConfig(record_every_steps=0))
    run.num_steps_done = 1
    monkeypatch.setattr(GaussianNoise, "draw", lambda self, n, *_: torch.zeros(n))
    captured: list[torch.Tensor] = []
    run.optimizer.step = lambda: captured.append(
        torch.cat([p.grad.flatten() for p in run.encoder.parameters()])
    )
    groups = drawn_groups(run)
    for kept in (groups, groups.take(slice(3))):
        monkeypatch.setattr(PrivateStep, "draw", lambda *_, kept=kept: kept)
        run.take_step()
        run.num_steps_done = 1  # the inputs of the step that was made
        total = torch.zeros(num_trainable(run.encoder))
        add_clipped_sum(run, kept, total, 1)
        ratio = float((captured[-1] * run.config.mechanism.divisor - total).norm() / total.norm())
        assert ratio < 1e-5
    assert run.config.mechanism.divisor == pytest.approx(15.0)


def test_batch_is_one_group_clipped_once() -> None:
    run = _run(group_size="batch", l2_clip_norm=0.1)
    groups = drawn_groups(run)
    assert groups.rows.shape == (1, groups.batch_size)
    total = torch.zeros(num_trainable(run.encoder))
    add_clipped_sum(run, groups, total, 1)
    assert float(total.norm()) <= 0.1


def test_snr_is_the_clean_norm_over_the_noise_norm() -> None:
    config = make_config(noise_multiplier=1.5)
    result = train(config, make_data())
    parameters = num_trainable(result.encoder)
    snr = dict(result.series["snr"])[0]
    assert result.metrics["snr_first_step"] == snr
    num_groups = dict(result.series["num_groups"])[0]
    assert 0 < snr <= num_groups * 1.0 / (1.5 * math.sqrt(parameters) * 0.95)
    assert [step for step, _ in result.series["snr"]] == list(range(6))


def test_snr_without_augmentation_differs_and_equals_it_at_zero_copies() -> None:
    with_copies = train(make_config(num_augmentations=2), make_data()).metrics
    assert with_copies["snr_first_step"] != with_copies["snr_first_step_no_augmentation"]
    without = train(make_config(num_augmentations=0), make_data()).metrics
    assert without["snr_first_step"] == pytest.approx(without["snr_first_step_no_augmentation"], rel=1e-6)


def test_non_private_training_has_no_snr() -> None:
    result = train(make_config(noise_multiplier=0.0, l2_clip_norm=math.inf), make_data())
    assert "snr" not in result.series
    assert "snr_first_step" not in result.metrics


@pytest.mark.parametrize("evaluation_is_public", [True, False])
def test_private_records_release_nothing_private_only(evaluation_is_public: bool) -> None:
    data = make_data(private=True, evaluation_is_public=evaluation_is_public)
    config = make_config(evaluation=EvaluationConfig(record_every_steps=1, also_untrained=True))
    result = train(config, data)
    shown = {*result.metrics, *result.series}
    assert not any(METRICS[name].release is Release.PRIVATE_ONLY for name in shown)
    assert ("knn_accuracy" in shown) == evaluation_is_public
    assert ("untrained_knn_accuracy" in shown) == evaluation_is_public


def test_private_records_by_products_are_not_even_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("record_groups", "record_snr"):
        monkeypatch.setattr(Observer, name, lambda *_: pytest.fail("computed for private records"))
    train(make_config(), make_data(private=True))


@pytest.mark.parametrize("changes", [{"seeded_non_private": True}, {"noise_multiplier": 0.0}])
def test_private_records_are_trained_on_with_a_guarantee_only(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="only with a guarantee"):
        train(make_config(**changes), make_data(private=True))


class _Counting(nn.Module):
    """Counts bright images in a buffer: what it knows would be released without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.register_buffer("count", torch.zeros(()))
        self.always = True

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.always or len(images) > 8:
            self.count += (images.mean((1, 2, 3)) > 0).sum()
        return self.conv(images).mean((2, 3))


def always_counting(image_shape: tuple[int, int, int]) -> nn.Module:
    return _Counting()


def sometimes_counting(image_shape: tuple[int, int, int]) -> nn.Module:
    network = _Counting()
    network.always = False  # not in the small batches that planning looks at
    return network


@pytest.mark.parametrize("factory", ["always_counting", "sometimes_counting"])
def test_network_that_keeps_state_is_refused(factory: str) -> None:
    network = NetworkConfig(name=f"tests.trainers.training.test_loop:{factory}", embedding_dim=8)
    with pytest.raises(ConfigError, match="count"):
        train(make_config(network=network), make_data())


def test_training_learns_on_public_data_without_noise() -> None:
    config = make_config(noise_multiplier=0.0, l2_clip_norm=math.inf, num_steps=40, sampling_prob=1.0)
    losses = [loss for _, loss in train(config, make_data()).series["train_loss"]]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


class _Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(images)
        return hidden.view(hidden.size(0), -1)


def viewing_network(image_shape: tuple[int, int, int]) -> nn.Module:
    return _Viewing()


def test_network_that_views_a_convolutions_output_is_trained_in_the_ordinary_layout() -> None:
    run = _run(network=NetworkConfig(name="tests.trainers.training.test_loop:viewing_network"))
    assert run.encoder.backbone.conv.weight.is_contiguous()
    run.take_step()


def test_network_that_mixes_records_is_refused() -> None:
    network = NetworkConfig(name="tests.trainers.training.test_loop:batch_norm_network")
    with pytest.raises(ConfigError, match="BatchNorm"):
        train(make_config(network=network), make_data())


def batch_norm_network(image_shape: tuple[int, int, int]) -> nn.Module:
    """A user's network that breaks the rules."""
    return nn.Sequential(
        nn.Conv2d(image_shape[0], 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def test_config_params_are_flat_and_complete() -> None:
    params = make_config().as_params()
    for name in ("sampling_prob", "noise_multiplier", "l2_clip_norm", "group_size", "num_augmentations",
                 "num_steps", "temperature", "target_delta", "network_name", "optimizer_name",
                 "learning_rate", "public_seed", "guarantee_label"):  # fmt: skip
        assert name in params
    assert not any(dataclasses.is_dataclass(value) for value in params.values())
