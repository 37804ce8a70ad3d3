"""The public subspace in the training step: where noise and gradients go, and what it is computed of."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.sampling.stage import DrawnGroups
from tests.trainers.conftest import make_config, make_data, make_records
from tests.trainers.files.test_checkpoint import _crashed, _folder
from tests.trainers.training.test_pairs import WHOLE, config_of
from tests.trainers.training.test_workers import _spawn
from trainers.config.training import (
    NetworkConfig,
    OptimizerConfig,
    PublicRecordsConfig,
    TrainingConfig,
)
from trainers.data.dataset import TrainingData
from trainers.data.public import PublicPool
from trainers.training import loop
from trainers.training.loop import train
from trainers.training.subspace import public_basis
from trainers.training.workers import SingleWorker, current_workers

DIM = 3
GROUPS = np.arange(24).reshape(-1, 4)
POOL = PublicPool(name="others", pool=make_records(80, prefix="public"))


def _config(**changes: object) -> TrainingConfig:
    names = {each.name for each in dataclasses.fields(PublicRecordsConfig)} & set(changes)
    public = {"subspace_dim": DIM} | {name: changes.pop(name) for name in names}
    changes = {"seeded_non_private": True, "l2_clip_norm": 0.05} | changes
    return make_config(public=PublicRecordsConfig(**public), **changes)  # type: ignore[arg-type]


def _data(**changes: object) -> TrainingData:
    return dataclasses.replace(make_data(), public_records=POOL, **changes)


def _run(**changes: object) -> loop._Run:
    run = loop._prepare(_config(**changes), _data(), SingleWorker())
    loop._use_public_records(run)
    return run


def _weights(encoder: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainable_parameters(encoder)])


def _captured(run: loop._Run) -> Tensor:
    """The gradient that the optimizer is given in one step."""
    found: list[Tensor] = []
    run.optimizer.step = lambda: found.append(  # type: ignore[method-assign]
        torch.cat([p.grad.flatten() for p in trainable_parameters(run.encoder)])
    )
    loop._step(run)
    return found[0]


def _group_gradients(run: loop._Run, inputs: Tensor) -> Tensor:
    objective = loop.objective_of(run.config, run.encoder, run.config.network, None, run.public_keys)
    parameters = trainable_parameters(run.encoder)
    rows = [torch.autograd.grad(objective(each[None]).sum(), parameters) for each in inputs]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).double()


def test_clipped_sum_is_that_of_the_dense_projections() -> None:
    run = _run()
    assert run.basis is not None
    run.total.zero_()
    loop._add_clipped_sum(run, DrawnGroups.all_complete(GROUPS), run.total, 1)
    coordinates = _group_gradients(run, loop._inputs(run, GROUPS, 1)) @ run.basis.double().T
    expected = (coordinates * (0.05 / coordinates.norm(dim=1)).clamp_max(1)[:, None]).sum(0)
    assert run.total.shape == (DIM,)
    assert float((run.total - expected).norm() / expected.norm()) < 1e-3


def test_subspace_is_spanned_by_the_gradients_of_public_groups() -> None:
    """At the weights before the step, made and compared as private groups are."""
    run = _run()
    assert run.basis is not None
    records = POOL.records(2 * DIM * 4, seed=run.config.public_seed, step=0, purpose="subspace")
    groups = np.arange(2 * DIM * 4).reshape(-1, 4)
    inputs = run.task.inputs(run.config, run.encoder, records, groups, step=0, num_augmentations=1)
    gradients = _group_gradients(run, inputs)
    gradients *= (0.05 / gradients.norm(dim=1)).clamp_max(1)[:, None]
    leading = torch.linalg.svd(gradients, full_matrices=False)[2][:DIM]
    # The distance of QᵀQ from the projection, which has norm √k, from k × k products alone.
    basis = run.basis.double()
    gram, overlap = (basis @ basis.T).square().sum(), (basis @ leading.T).square().sum()
    assert math.sqrt(abs(float(gram + DIM - 2 * overlap)) / DIM) < 0.01


def test_subspace_does_not_follow_the_private_records() -> None:
    """Bit for bit: other training records, and fewer of them, change nothing."""
    bases = []
    for records in (make_records(60), make_records(59, prefix="other")):
        data = _data(train=records, index=None, queries=None)
        run = loop._prepare(_config(), data, SingleWorker())
        loop._use_public_records(run)
        bases.append(run.basis)
    assert torch.equal(*bases)  # type: ignore[arg-type]


def test_noise_is_drawn_in_the_subspace_at_the_std_of_the_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    """k numbers of standard deviation σΔ, and nothing of the released gradient lies outside of their span."""
    drawn: list[tuple[float, int]] = []
    right = GaussianNoise.draw

    def spy(self: GaussianNoise, num_coordinates: int, generator: object) -> Tensor:
        drawn.append((self.std, num_coordinates))
        return right(self, num_coordinates, generator)  # type: ignore[arg-type]

    monkeypatch.setattr(GaussianNoise, "draw", spy)
    run = _run()
    gradient = _captured(run).double()
    mechanism = run.config.mechanism
    assert drawn == [(mechanism.noise_multiplier * mechanism.sensitivity, DIM)]
    assert run.basis is not None
    basis = run.basis.double()
    outside = gradient - basis.T @ (basis @ gradient)
    assert float(outside.norm() / gradient.norm()) < 1e-6


def test_released_gradient_is_the_noisy_sum_of_the_subspace_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run()
    noise = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    monkeypatch.setattr(loop, "_noise_of", lambda run, law: lambda part: noise[part])
    monkeypatch.setattr(loop, "_draw_groups", lambda run: DrawnGroups.all_complete(GROUPS))
    clean = torch.zeros_like(run.total)
    loop._add_clipped_sum(run, DrawnGroups.all_complete(GROUPS), clean, 1)
    gradient = _captured(run).double()
    assert run.basis is not None
    expected = run.basis.double().T @ (clean + noise) / run.config.mechanism.divisor
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


def test_exchanged_group_moves_the_sum_by_no_more_than_the_sensitivity() -> None:
    run = _run()
    exchanged = GROUPS.copy()
    exchanged[1, 2] = 50
    sums = [torch.zeros_like(run.total) for _ in range(2)]
    for total, groups in zip(sums, (GROUPS, exchanged), strict=True):
        loop._add_clipped_sum(run, DrawnGroups.all_complete(groups), total, 1)
    assert 0 < float((sums[1] - sums[0]).norm()) <= run.config.mechanism.sensitivity


@pytest.mark.parametrize(("every", "renewed"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
def test_subspace_is_renewed_on_its_schedule(
    every: int, renewed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def spy(*args, **kwargs):  # type: ignore[no-untyped-def]
        steps.append(args[3])
        return public_basis(*args, **kwargs)

    monkeypatch.setattr(loop, "public_basis", spy)
    run = loop._prepare(_config(subspace_every_steps=every), _data(), SingleWorker())
    for _ in range(4):
        loop._step(run)
        run.step += 1
    assert steps == renewed


@pytest.mark.ci
@pytest.mark.parametrize("every", [1, 4])
def test_training_in_a_subspace_resumes_where_it_would_have_been(
    every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkpoint between two renewals keeps the directions, which are those of earlier weights."""
    config = _config(subspace_every_steps=every)
    whole = train(config, _data())
    monkeypatch.setattr("tests.trainers.files.test_checkpoint.make_data", lambda **_: _data())
    _crashed(monkeypatch, tmp_path, 2, seeded_non_private=True, l2_clip_norm=0.05, public=config.public)
    saved = _folder(tmp_path).load()
    assert saved is not None
    assert (saved.basis is None) == (every == 1)
    resumed = train(config, _data(), checkpoints=_folder(tmp_path))
    assert torch.equal(_weights(whole.encoder), _weights(resumed.encoder))


def test_public_negatives_enter_the_subspace_too() -> None:
    with_keys, without = _run(num_public_negatives=6), _run()
    assert not torch.allclose(with_keys.basis, without.basis)  # type: ignore[arg-type]
    loop._step(with_keys)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_subspace_of_a_low_precision_network_is_near(precision: str) -> None:
    network = NetworkConfig(name="small_cnn", embedding_dim=8)
    bases = [
        _run(network=dataclasses.replace(network, precision=each)).basis for each in ("float32", precision)
    ]
    assert bases[0] is not None
    assert bases[1] is not None
    assert float((bases[1] @ bases[0].T).norm()) > 0.9 * math.sqrt(DIM)
    loop._step(_run(network=dataclasses.replace(network, precision=precision)))


def test_byol_trains_in_a_subspace() -> None:
    network = NetworkConfig(name="small_cnn", embedding_dim=8, predictor=True)
    run = _run(method="byol_groups", num_augmentations=0, group_size=1, network=network)
    before = _weights(run.encoder)
    loop._step(run)
    assert not torch.equal(_weights(run.encoder), before)


def test_training_without_noise_stays_in_the_subspace() -> None:
    run = _run(noise_multiplier=0.0, l2_clip_norm=math.inf)
    gradient = _captured(run).double()
    assert run.basis is not None
    basis = run.basis.double()
    assert float((gradient - basis.T @ (basis @ gradient)).norm() / gradient.norm()) < 1e-6


def test_noise_sgd_takes_steps_of_unit_noise_in_the_subspace() -> None:
    optimizer = OptimizerConfig(name="noise_sgd")
    plain, scaled = (_captured(_run(optimizer=each)) for each in (OptimizerConfig(name="sgd"), optimizer))
    mechanism = _config().mechanism
    noise_std = mechanism.noise_multiplier * mechanism.sensitivity / mechanism.divisor
    torch.testing.assert_close(scaled, plain / noise_std)


def _train_and_save(rank: int, folder: Path) -> None:
    result = train(_config(sampling_prob=0.4), _data(), workers=current_workers())
    torch.save(_weights(result.encoder), folder / f"{rank}.pt")


@pytest.mark.ci
def test_workers_share_one_subspace(tmp_path: Path) -> None:
    one = _weights(train(_config(sampling_prob=0.4), _data()).encoder)
    _spawn(_train_and_save, 2, tmp_path)
    both = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert torch.equal(*both)
    assert float((both[0] - one).norm() / one.norm()) < 1e-4


def test_methods_that_clip_no_groups_of_a_fixed_size_refuse_a_subspace() -> None:
    for method in ("dp_sgd", "group_clip"):
        with pytest.raises(ConfigError, match=rf"clip groups of a fixed size.*{method} with group_size = 4"):
            _config(method=method, batch_cap=100)
    with pytest.raises(ConfigError, match="dp_clip with group_size = batch does not"):
        _config(method="dp_clip", group_size="batch")
    with pytest.raises(ConfigError, match="give subspace_dim or per_tower_clipping, not both"):
        config_of(network=WHOLE, per_tower_clipping=True, public=PublicRecordsConfig(subspace_dim=2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"subspace_dim": -1}, "subspace_dim must not be negative; got -1"),
        ({"subspace_every_steps": 0}, "subspace_every_steps must be at least 1; got 0"),
        ({"subspace_groups": 2}, "subspace_groups must be at least subspace_dim = 3.*got 2"),
        ({"subspace_dim": 0, "subspace_groups": 5}, "there is none: give --subspace-dim"),
        ({"subspace_dim": 0, "subspace_every_steps": 5}, "there is none: give --subspace-dim"),
    ],
)
def test_subspaces_out_of_range_are_refused(given: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _config(**given)


def test_subspace_asks_for_public_records_and_enough_of_them() -> None:
    with pytest.raises(ConfigError, match=r"none are given: give --public-records .* subspace_dim = 3"):
        train(_config(), make_data())
    with pytest.raises(ConfigError, match="at most the 80 public records of others; got 84"):
        train(_config(subspace_groups=21), _data())


def test_subspace_has_no_more_dimensions_than_there_are_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    number = num_trainable(_run().encoder)
    monkeypatch.setattr(PublicPool, "check", lambda self, num_records: None)
    config = _config(subspace_dim=number + 1)
    with pytest.raises(ConfigError, match=f"trainable weights, {number}; got {number + 1}"):
        loop._prepare(config, _data(), SingleWorker())
