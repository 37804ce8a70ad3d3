"""Public negatives in the training step: constants of public records, the same for every group."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.clipper import ONE_BY_ONE
from dpgcl_core.clipping.types import no_sum, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.sampling.stage import DrawnGroups
from tests.trainers.conftest import make_config, make_data, make_records
from tests.trainers.files.test_checkpoint import _crashed, _folder
from tests.trainers.training.test_pairs import WHOLE, config_of, data_of, pairs
from trainers.config.training import NetworkConfig, PublicRecordsConfig, TrainingConfig
from trainers.data.dataset import TrainingData
from trainers.data.public import ProceduralImages, PublicPool
from trainers.training import loop
from trainers.training.loop import train
from trainers.training.workers import SingleWorker

NUM_PUBLIC, SIZE, TEMPERATURE = 7, 4, 0.2
GROUPS = np.arange(24).reshape(-1, SIZE)
POOL = PublicPool(name="others", pool=make_records(40, prefix="public"))


def _config(num_public: int = NUM_PUBLIC, **changes: object) -> TrainingConfig:
    changes = {"seeded_non_private": True, "l2_clip_norm": 0.05} | changes
    return make_config(public=PublicRecordsConfig(num_public_negatives=num_public), **changes)


def _data(**changes: object) -> TrainingData:
    return dataclasses.replace(make_data(), public_records=POOL, **changes)


def _run(num_public: int = NUM_PUBLIC, **changes: object) -> loop._Run:
    run = loop._prepare(_config(num_public, **changes), _data(), SingleWorker())
    loop._use_public_records(run)
    return run


def _sum(run: loop._Run, groups: DrawnGroups) -> Tensor:
    total = no_sum(run.encoder)
    loop._add_clipped_sum(run, groups, total, run.config.num_augmentations)
    return total


def _keys_by_hand(run: loop._Run, step: int = 0) -> Tensor:
    """One record at a time, each by its first view."""
    records = POOL.records(NUM_PUBLIC, seed=run.config.public_seed, step=step, purpose="negatives")
    rows = np.arange(NUM_PUBLIC)[:, None]
    views = run.task.inputs(run.config, run.encoder, records, rows, step=step, num_augmentations=0)
    with torch.no_grad():
        return torch.cat([run.encoder(each[0, :1]) for each in views])


def _naive_sum(run: loop._Run, keys: Tensor) -> Tensor:
    """Σ Clip_C(∇L_G), a backward pass and a sum over every pair of records by hand for each group."""
    views, total = loop._inputs(run, GROUPS, run.config.num_augmentations), no_sum(run.encoder)
    parameters, bound = trainable_parameters(run.encoder), run.config.mechanism.l2_clip_norm
    for group in views:
        z = run.encoder(group.flatten(0, 1)).unflatten(0, group.shape[:2])
        loss = torch.zeros(())
        for query, own in zip(z[:, 0], z[:, 1], strict=True):
            others = torch.cat([z[:, 1:].flatten(0, 1), keys]) @ query / TEMPERATURE
            loss = loss + torch.logsumexp(others, 0) - query @ own / TEMPERATURE
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).double()
        total += gradient * min(1.0, bound / float(gradient.norm()))
    return total


def test_clipped_sum_is_that_of_the_naive_loop_with_fixed_keys() -> None:
    """One pass for all groups, after an extra pass through the same network, against one group at a time."""
    run = _run()
    actual = _sum(run, DrawnGroups.all_complete(GROUPS))
    expected = _naive_sum(run, _keys_by_hand(run))
    assert float((actual - expected).norm() / expected.norm()) < 1e-3
    without = _sum(_run(0), DrawnGroups.all_complete(GROUPS))
    assert float((actual - without).norm() / expected.norm()) > 0.05


def test_groups_keep_their_one_pass() -> None:
    """The extra pass ends before the engine's hooks are on the network, which is left as it was."""
    run = _run()
    config, inputs = run.config, loop._inputs(run, GROUPS, 1)
    objective = loop.objective_of(config, run.encoder, config.network, None, run.public_keys)
    report = config.rule(len(GROUPS)).add_clipped_sum(
        no_sum(run.encoder), run.encoder, objective, inputs, None
    )
    assert report.paths
    assert ONE_BY_ONE not in report.paths.values()
    assert all(p.requires_grad and p.grad is None for p in trainable_parameters(run.encoder))
    assert not any(module._forward_hooks for module in run.encoder.modules())


def test_public_keys_are_embeddings_of_public_records_without_gradient() -> None:
    run = _run()
    assert run.public_keys is not None
    assert run.public_keys.shape == (NUM_PUBLIC, 1, run.config.network.embedding_dim)  # type: ignore[union-attr]
    assert not run.public_keys.requires_grad
    torch.testing.assert_close(run.public_keys[:, 0], _keys_by_hand(run))


def test_public_keys_do_not_follow_the_private_records() -> None:
    """Bit for bit: other training records, and fewer of them, change none."""
    keys = []
    for train_records in (make_records(60), make_records(59, prefix="other")):
        data = _data(train=train_records, index=None, queries=None)
        run = loop._prepare(_config(), data, SingleWorker())
        loop._use_public_records(run)
        keys.append(run.public_keys)
    assert torch.equal(*keys)


def test_companions_change_no_bit_of_a_contribution() -> None:
    """What a group adds to the sum is a function of its records, the weights and the public keys."""
    run = _run()
    counted = np.arange(len(GROUPS)) == 2
    drawn = [
        DrawnGroups(rows=rows, complete=counted, batch_size=rows.size)
        for rows in (GROUPS, np.where(counted[:, None], GROUPS, GROUPS + 30))
    ]
    one, other = (_sum(run, each) for each in drawn)
    assert float(one.norm()) > 0
    assert torch.equal(one, other)


def test_exchanged_record_moves_the_sum_by_no_more_than_the_sensitivity() -> None:
    run = _run()
    exchanged = GROUPS.copy()
    exchanged[1, 2] = 50
    moved = _sum(run, DrawnGroups.all_complete(exchanged)) - _sum(run, DrawnGroups.all_complete(GROUPS))
    assert 0 < float(moved.norm()) <= run.config.mechanism.sensitivity


def test_every_step_has_keys_of_its_own_by_its_own_weights() -> None:
    run = loop._prepare(_config(), _data(), SingleWorker())
    keys = []
    for step in range(2):
        before = _keys_by_hand(run, step)
        loop._step(run)
        assert run.public_keys is not None
        torch.testing.assert_close(run.public_keys[:, 0], before)
        keys.append(before)
        run.step += 1
    assert not torch.allclose(*keys)


def test_draw_is_the_same_for_everybody_and_another_at_every_step_and_purpose() -> None:
    def ids(**changes: object) -> list[int]:
        asked = {"num_records": 12, "seed": 3, "step": 5, "purpose": "negatives"} | changes
        records = POOL.records(**asked)  # type: ignore[arg-type]
        return records.ids.tolist()

    assert ids() == ids()
    assert len(set(ids())) == 12
    others = [ids(step=6), ids(seed=4), ids(purpose="subspace")]
    assert all(other != ids() for other in others)


def test_procedural_images_are_another_draw_at_every_step_and_purpose() -> None:
    source = ProceduralImages(image_shape=(3, 12, 10))

    def pixels(**changes: object) -> bytes:
        asked = {"num_records": 5, "seed": 3, "step": 5, "purpose": "negatives"} | changes
        records = source.records(**asked)  # type: ignore[arg-type]
        assert records.images.shape == (5, 3, 12, 10)
        assert len(set(records.ids.tolist())) == 5
        return records.images.tobytes()

    assert pixels() == pixels()
    assert len({pixels(**each) for each in ({}, {"step": 6}, {"seed": 4}, {"purpose": "subspace"})}) == 4


def test_training_takes_procedural_images_for_negatives_and_subspace() -> None:
    public = PublicRecordsConfig(num_public_negatives=6, subspace_dim=2)
    data = dataclasses.replace(make_data(), public_records=ProceduralImages(image_shape=(1, 8, 8)))
    run = loop._prepare(make_config(public=public, num_steps=2), data, SingleWorker())
    loop._step(run)
    assert run.public_keys is not None
    assert run.basis is not None
    assert (len(run.public_keys), len(run.basis)) == (6, 2)


def test_public_keys_of_a_low_precision_network_are_float32() -> None:
    run = _run(network=NetworkConfig(name="small_cnn", embedding_dim=8, precision="bfloat16"))
    assert run.public_keys is not None
    assert run.public_keys.dtype == torch.float32
    assert float((run.public_keys[:, 0] - _keys_by_hand(run)).abs().max()) < 0.05


def test_more_public_records_than_a_pass_takes_are_all_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _run().public_keys
    monkeypatch.setattr("trainers.training.public_keys._AT_ONCE", 3)
    parts = _run().public_keys
    assert whole is not None
    assert parts is not None
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("draws", [1, 2])
def test_public_pairs_are_embedded_as_image_and_caption(draws: int) -> None:
    config = config_of(
        network=WHOLE, num_view_draws=draws, public=PublicRecordsConfig(num_public_negatives=5)
    )
    pool = PublicPool(name="shapes", pool=pairs(12))
    data = dataclasses.replace(data_of(pairs()), public_records=pool)
    run = loop._prepare(config, data, SingleWorker())
    loop._use_public_records(run)
    keys = run.public_keys
    assert keys is not None
    assert keys.shape[:2] == (5, 2)
    records = pool.records(5, seed=config.public_seed, step=0, purpose="negatives")
    one = dataclasses.replace(config, num_view_draws=1)
    views = run.task.inputs(one, run.encoder, records, np.arange(5)[None], step=0, num_augmentations=0)
    with torch.no_grad():
        expected = run.task.embed(run.encoder)(views)[0]
    torch.testing.assert_close(keys, expected)
    loop._step(run)


@pytest.mark.ci
def test_training_with_public_negatives_resumes_where_it_would_have_been(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = _config()
    whole = train(config, _data())
    monkeypatch.setattr("tests.trainers.files.test_checkpoint.make_data", lambda **_: _data())
    _crashed(monkeypatch, tmp_path, 2, seeded_non_private=True, l2_clip_norm=0.05, public=config.public)
    resumed = train(config, _data(), checkpoints=_folder(tmp_path))
    for one, other in zip(whole.encoder.parameters(), resumed.encoder.parameters(), strict=True):
        assert torch.equal(one, other)


def test_plain_gradient_without_privacy_has_public_keys_too() -> None:
    """The row to compare with: the same loss over the whole batch, without clipping and noise."""
    numbers = {"method": "non_private", "noise_multiplier": 0.0, "l2_clip_norm": math.inf}
    run, without = (
        _run(number, group_size="batch", num_augmentations=1, **numbers) for number in (NUM_PUBLIC, 0)
    )
    drawn = DrawnGroups.all_complete(GROUPS.reshape(1, -1))
    assert not torch.allclose(_sum(run, drawn), _sum(without, drawn))


WITHOUT_PLACE = sorted(name for name, method in METHODS.items() if not method.takes_public_keys)


def test_methods_without_a_place_for_public_keys_refuse_them() -> None:
    assert {"logit_dp", "dp_sgd", "group_clip", "byol_groups", "dpcl_simclr"} <= set(WITHOUT_PLACE)
    with pytest.raises(ConfigError, match=r"group_clip has no place for public keys; dp_gcl.*have"):
        _config(method="group_clip", batch_cap=40)
    with pytest.raises(ConfigError, match="logit_dp has no place for public keys"):
        _config(method="logit_dp", num_augmentations=0, group_size="batch", batch_cap=100, temperature=0.2)


def test_public_negatives_ask_for_public_records_and_enough_of_them() -> None:
    with pytest.raises(ConfigError, match=r"none are given: give --public-records procedural .* got .* = 7"):
        train(_config(), make_data())
    with pytest.raises(ConfigError, match="at most the 40 public records of others; got 41"):
        train(_config(41), _data())
    with pytest.raises(ConfigError, match="num_public_negatives must not be negative; got -1"):
        _config(-1)


def test_learned_temperature_takes_no_public_keys() -> None:
    network = dataclasses.replace(WHOLE, learn_temperature=True)
    with pytest.raises(ConfigError, match="half of the temperature's gradient would be missing"):
        config_of(network=network, public=PublicRecordsConfig(num_public_negatives=5))
