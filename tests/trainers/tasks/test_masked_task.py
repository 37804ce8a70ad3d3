"""Masked images: each record's loss and clipped gradient are its own, in one pass, and training learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.clipper import ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from tests.sweeps import support
from trainers.config.networks import MaskedNetworkConfig
from trainers.config.settings import TrainingOptions
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data.dataset import TrainingData
from trainers.data.pairs import ImageTextRecords
from trainers.data.procedural import procedural_images
from trainers.data.records import Records
from trainers.files.checkpoint import CheckpointFolder
from trainers.files.weights import read_weights
from trainers.models.masked import MaskedAutoEncoder
from trainers.tasks import MASKED_IMAGES
from trainers.tasks.masked_task import patch_orders
from trainers.training.loop import train
from trainers.training.resolve import training_config
from trainers.views.image_views import normalise

pytestmark = pytest.mark.ci

SHAPE = (1, 8, 8)
OPTIONS = replace_options(
    TrainingOptions(),
    method="dp_mae",
    network="mae-toy",
    patch_size=2,
    num_augmentations=0,
    noise_multiplier=1.0,
    expected_batch_size=16,
    num_steps=4,
    max_views_per_microbatch=8,
)


def records_of(count: int = 40, *, labelled: bool = False) -> Records:
    ids = np.arange(count, dtype=np.uint64)
    labels = (ids % 2).astype(np.int64) if labelled else None
    return Records(images=procedural_images(ids, SHAPE, seed=3), ids=ids, labels=labels)


def config_of(**changes: object) -> TrainingConfig:
    return training_config(replace_options(OPTIONS, **changes), num_records=40, public_seed=0)


def data_of(*, labelled: bool = False) -> TrainingData:
    records = records_of(labelled=labelled)
    scored = records if labelled else None
    return TrainingData(
        train=records, index=scored, queries=scored, train_is_public=True, evaluation_is_public=True
    )


def network_of(config: TrainingConfig) -> MaskedAutoEncoder:
    """At weights that give every parameter a gradient."""
    network = MASKED_IMAGES.build(config, SHAPE, None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network


def inputs_of(config: TrainingConfig, network: MaskedAutoEncoder, rows: list[int]) -> tuple[Tensor, ...]:
    groups = np.array(rows)[:, None]
    found = MASKED_IMAGES.inputs(config, network, records_of(), groups, step=2, num_augmentations=0)
    assert isinstance(found, tuple)
    return found


def oracle(network: MaskedAutoEncoder, inputs: tuple[Tensor, ...], l2_clip_norm: float) -> Tensor:
    """Each record's loss patch by patch, each record's gradient by itself, in float64."""
    total = torch.zeros(num_trainable(network), dtype=torch.float64)
    for images, orders in zip(*inputs, strict=True):
        image, order = images[0], orders[0]
        rebuilt, patches, loss = network(image, order)[0], network.patches(image)[0], torch.zeros(())
        for place, patch in enumerate(order[0, -network.num_hidden :].tolist()):
            known = patches[patch]
            known = (known - known.mean()) / (known.var() + 1e-6).sqrt()
            loss = loss + (rebuilt[place] - known).square().mean() / network.num_hidden
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        flat = torch.cat([each.flatten().double() for each in gradients])
        total += flat * min(1.0, l2_clip_norm * (1 - 1e-4) / float(flat.norm()))
    return total


@pytest.mark.parametrize("l2_clip_norm", [0.02, 50.0])
def test_clipped_sum_equals_oracle_with_every_layer_in_the_fast_path(l2_clip_norm: float) -> None:
    config = config_of()
    network = network_of(config)
    inputs, total = inputs_of(config, network, [0, 5, 7, 30]), torch.zeros(num_trainable(network))
    report = GroupClipper(l2_clip_norm=l2_clip_norm).add_clipped_sum(
        total, network, MASKED_IMAGES.losses(network), inputs
    )
    expected = oracle(network, inputs, l2_clip_norm)
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-5
    assert ONE_BY_ONE not in report.paths.values()
    matrices = {
        name
        for name, module in network.named_modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
    }
    assert matrices <= report.paths.keys()


def test_recomputing_network_takes_the_exact_loop() -> None:
    plain, config = network_of(config_of()), config_of(gradient_checkpointing=True)
    network = network_of(config)
    inputs, total = inputs_of(config, network, [0, 5, 7]), torch.zeros(num_trainable(network))
    report = GroupClipper(l2_clip_norm=0.02).add_clipped_sum(
        total, network, MASKED_IMAGES.losses(network), inputs
    )
    assert report.paths == {"": ONE_BY_ONE}
    expected = oracle(plain, inputs, 0.02)
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-5


def test_one_more_record_moves_the_sum_by_its_own_clipped_gradient() -> None:
    """The companions' contributions are the same bits with and without it: sensitivity C, attained."""
    config = config_of()
    network, clipper = network_of(config), GroupClipper(l2_clip_norm=0.02)

    def total_of(rows: list[int]) -> Tensor:
        total = torch.zeros(num_trainable(network), dtype=torch.float64)
        clipper.add_clipped_sum(
            total, network, MASKED_IMAGES.losses(network), inputs_of(config, network, rows)
        )
        return total

    moved = total_of([1, 2, 3, 9]) - total_of([1, 2, 3])
    assert 0.999 * 0.02 < float(moved.norm()) <= 0.02
    alone = total_of([9])
    assert float((moved - alone).norm()) < 1e-6


def test_mask_of_a_record_follows_neither_its_companions_nor_its_place() -> None:
    config = config_of()
    network = network_of(config)
    one, other = inputs_of(config, network, [4, 8, 15]), inputs_of(config, network, [30, 15])
    for both, few in zip(one, other, strict=True):
        assert torch.equal(both[2], few[1])


def test_masks_are_fresh_at_every_step_and_uniform() -> None:
    ids = np.arange(4_000, dtype=np.uint64)
    first, second = (patch_orders(ids, 4, seed=0, step=step) for step in (0, 1))
    assert first.shape == (4_000, 4)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(-1).values, torch.arange(4).expand_as(first))
    counts = torch.bincount(first @ torch.tensor([64, 16, 4, 1]))
    counts = counts[counts > 0]
    assert len(counts) == 24  # every order of four patches
    assert float(((counts - 4_000 / 24) ** 2 / (4_000 / 24)).sum()) < 49.7  # χ² of 23 degrees, 99.9 %


def test_mask_that_sees_other_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    network = network_of(config)
    rebuild = MaskedAutoEncoder.forward

    def leaking(self: MaskedAutoEncoder, images: Tensor, order: Tensor) -> Tensor:
        return rebuild(self, images + 1e-3 * images.mean(0), order)

    MASKED_IMAGES.check_network(config, network, SHAPE)
    monkeypatch.setattr(MaskedAutoEncoder, "forward", leaking)
    with pytest.raises(ConfigError, match="changed when another group changed"):
        MASKED_IMAGES.check_network(config, network, SHAPE)


def test_mechanism_clips_each_record_with_sensitivity_c() -> None:
    for sampling in (None, "records", "groups"):
        mechanism = config_of(sampling=sampling, l2_clip_norm=0.5).mechanism
        assert mechanism.group_size == 1
        assert mechanism.sensitivity == 0.5
        assert mechanism.divisor == pytest.approx(16)
        assert mechanism.rules.clip_unit == "record"


def test_training_learns_without_noise() -> None:
    config = replace_options(
        OPTIONS,
        noise_multiplier=None,
        epsilon=float("inf"),
        num_steps=30,
        learning_rate=3e-3,
        record_every_steps=1,
    )
    found = train(training_config(config, num_records=40, public_seed=0), data_of())
    losses = [value for _, value in found.series["train_loss"]]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


@pytest.mark.ci
def test_seeded_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    config = config_of(seeded_non_private=True)
    whole = train(config, data_of())
    folder = CheckpointFolder(tmp_path, every_steps=1)
    half = dataclasses.replace(config, mechanism=dataclasses.replace(config.mechanism, num_steps=2))
    train(half, data_of(), checkpoints=folder)
    resumed = train(config, data_of(), checkpoints=folder)
    both = zip(whole.encoder.parameters(), resumed.encoder.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.ci
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_training_in_low_precision_ends_finite(precision: str) -> None:
    found = train(config_of(precision=precision), data_of())
    assert all(torch.isfinite(p).all() for p in found.encoder.parameters())


def test_scores_are_of_the_encoders_features() -> None:
    metrics = train(config_of(), data_of(labelled=True)).metrics
    assert {"knn_accuracy", "linear_probe_accuracy", "untrained_knn_accuracy"} <= metrics.keys()


def test_records_without_an_index_are_scored_by_their_views() -> None:
    scored = dataclasses.replace(data_of(), queries=records_of())
    assert "view_retrieval_top1" in train(config_of(num_steps=1), scored).metrics


def test_public_start_is_of_the_same_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGCL_CACHE", str(tmp_path))
    options = replace_options(OPTIONS, warm_start=Path("synthetic:12"))
    config = training_config(options, num_records=40, public_seed=0, image_shape=SHAPE)
    assert config.warm_start is not None
    given = read_weights(Path(config.warm_start.path)).tensors
    started, fresh = (MASKED_IMAGES.build(config, SHAPE, tensors) for tensors in (given, None))
    ids = np.arange(9_000, 9_064, dtype=np.uint64)
    images = normalise(torch.from_numpy(procedural_images(ids, SHAPE, seed=7)))
    orders = patch_orders(ids, started.num_patches, seed=5, step=0)
    views = (images[:, None, None], orders[:, None, None])
    with torch.no_grad():
        before, after = (MASKED_IMAGES.losses(network)(views).mean() for network in (fresh, started))
    assert float(after) < 0.98 * float(before)


def test_of_pairs_the_images_alone_are_seen() -> None:
    records, config = records_of(), config_of()
    pairs = ImageTextRecords(images=records.images, captions=(("a", "b"),) * len(records), ids=records.ids)
    MASKED_IMAGES.check(config, pairs)
    network, groups = network_of(config), np.arange(6)[:, None]
    of_pairs = MASKED_IMAGES.inputs(config, network, pairs, groups, step=2, num_augmentations=0)
    for found, expected in zip(of_pairs, inputs_of(config, network, list(range(6))), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.ci
def test_sweep_on_pairs_trains_the_auto_encoder() -> None:
    given = ("--method", "dp_mae", "--group-sizes", "4", "--repeats", "1", "--no-non-private")
    (trial,) = support.plan("--dataset", "shapes:400", "--expected-batch-size", "64", *given).trials
    assert isinstance(trial.config.network, MaskedNetworkConfig)
    assert trial.config.text_views is None


# --- refused ---


@pytest.mark.parametrize("network", ["tiny_cnn", "vit_b_32_lora", "clip-tiny"])
def test_network_of_another_task_is_refused(network: str) -> None:
    with pytest.raises(ConfigError, match=r"network of dp_mae.*mae-toy"):
        train(config_of(network=network), data_of())


def test_auto_encoder_is_refused_by_contrastive_methods() -> None:
    options = replace_options(OPTIONS, method="dp_gcl", group_size=4)
    with pytest.raises(ConfigError, match="mae-toy"):
        train(training_config(options, num_records=40, public_seed=0), data_of())


def test_warm_start_of_another_network_names_the_first_mismatch(tmp_path: Path) -> None:
    torch.save(network_of(config_of(patch_size=4)).state_dict(), tmp_path / "other.pt")
    config = config_of(warm_start=tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=r"of the same network, but .* is not: .*embed\.weight"):
        train(config, data_of())


def test_options_of_contrast_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_augmentations must be 0.*augments no keys"):
        config_of(num_augmentations=1)


def test_sweep_takes_the_network_of_the_method_unless_another_is_given() -> None:
    given = ("--method", "dp_mae", "--group-sizes", "4", "--repeats", "1", "--no-non-private")
    (trial,) = support.plan("--dataset", "digits", *given, "--patch-size", "2").trials
    assert isinstance(trial.config.network, MaskedNetworkConfig)
    assert (trial.config.network.name, trial.config.network.patch_size) == ("mae-toy", 2)
    assert trial.config.num_augmentations == 0
