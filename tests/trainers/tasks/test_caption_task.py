"""Captions: each pair's loss and clipped gradient are its own, in one pass, and training learns."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.clipper import ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.types import GroupInputs, Objective, num_trainable
from dpgcl_core.errors import ConfigError
from tests.sweeps import support
from tests.trainers.conftest import make_records
from trainers.config.networks import AnyNetworkConfig, CaptionerConfig
from trainers.config.presets import PAIRS_CPU
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data.dataset import TrainingData
from trainers.data.pairs import ImageTextRecords
from trainers.data.shapes import FIRST_UNUSED_SHAPE, SHAPE_NAMES, make_shape_pairs
from trainers.files.checkpoint import CheckpointFolder
from trainers.files.weights import read_weights
from trainers.models.captioner import Captioner
from trainers.tasks import CAPTIONS
from trainers.training.loop import train
from trainers.training.public_start import Recipe, recipe_of
from trainers.training.resolve import training_config

SHAPE = (3, 32, 32)
OPTIONS = replace_options(
    PAIRS_CPU,
    method="dp_cap",
    network="cap-toy",
    patch_size=16,
    num_augmentations=0,
    noise_multiplier=1.0,
    expected_batch_size=16,
    num_steps=4,
    max_views_per_microbatch=8,
    also_untrained=False,
)
RECORDS = make_shape_pairs(40, seed=3, captions_per_image=2)


def config_of(**changes: object) -> TrainingConfig:
    options = replace_options(OPTIONS, **changes)
    return training_config(options, num_records=40, public_seed=0, modality="image-text", image_shape=SHAPE)


def data_of(*, scored: bool = False) -> TrainingData:
    return TrainingData(
        train=RECORDS,
        index=RECORDS if scored else None,
        queries=RECORDS if scored else None,
        train_is_public=True,
        evaluation_is_public=True,
        class_names=SHAPE_NAMES if scored else (),
    )


def network_of(config: TrainingConfig) -> Captioner:
    """At weights that give every parameter a gradient."""
    network = CAPTIONS.build(config, SHAPE, None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network


def inputs_of(
    config: TrainingConfig, network: Captioner, rows: list[int], records: ImageTextRecords = RECORDS
) -> tuple[Tensor, ...]:
    groups = np.array(rows)[:, None]
    found = CAPTIONS.inputs(config, network, records, groups, step=2, num_augmentations=0)
    assert isinstance(found, tuple)
    return found


def oracle(network: Captioner, inputs: tuple[Tensor, ...], l2_clip_norm: float) -> Tensor:
    """Each caption's loss token by token, without padding, each record's gradient by itself, in float64."""
    total = torch.zeros(num_trainable(network), dtype=torch.float64)
    for images, tokens in zip(*inputs, strict=True):
        text = tokens[0, 0].tolist()
        text, loss = text[: text.index(network.end_token) + 1], torch.zeros(())
        encoded = network.encode(images[0])
        for place in range(1, len(text)):
            logits = network.decode(encoded, torch.tensor([text[:place]]))[0, -1]
            loss = loss - logits.log_softmax(0)[text[place]] / (len(text) - 1)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        flat = torch.cat([each.flatten().double() for each in gradients])
        total += flat * min(1.0, l2_clip_norm * (1 - 1e-4) / float(flat.norm()))
    return total


# --- what is clipped ---


@pytest.mark.ci
@pytest.mark.parametrize(("l2_clip_norm", "tie_embeddings"), [(0.02, False), (0.02, True), (500.0, False)])
def test_clipped_sum_equals_oracle_with_every_layer_in_the_fast_path(
    l2_clip_norm: float, tie_embeddings: bool
) -> None:
    config = config_of(tie_embeddings=tie_embeddings)
    network = network_of(config)
    inputs, total = inputs_of(config, network, [0, 5, 7]), torch.zeros(num_trainable(network))
    report = GroupClipper(l2_clip_norm=l2_clip_norm).add_clipped_sum(
        total, network, CAPTIONS.losses(network), inputs
    )
    expected = oracle(network, inputs, l2_clip_norm)
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-5
    assert ONE_BY_ONE not in report.paths.values()
    matrices = {
        name
        for name, module in network.named_modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
    }
    assert matrices == report.paths.keys()


@pytest.mark.ci
def test_recomputing_network_takes_the_exact_loop() -> None:
    plain, config = network_of(config_of()), config_of(gradient_checkpointing=True)
    network = network_of(config)
    inputs, total = inputs_of(config, network, [0, 5]), torch.zeros(num_trainable(network))
    report = GroupClipper(l2_clip_norm=0.02).add_clipped_sum(total, network, CAPTIONS.losses(network), inputs)
    assert report.paths == {"": ONE_BY_ONE}
    expected = oracle(plain, inputs, 0.02)
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-5


def test_one_more_record_moves_the_sum_by_its_own_clipped_gradient() -> None:
    """The companions' contributions are the same with and without it: sensitivity C, attained."""
    config = config_of(tie_embeddings=True)
    network, clipper = network_of(config), GroupClipper(l2_clip_norm=0.02)

    def total_of(rows: list[int]) -> Tensor:
        total = torch.zeros(num_trainable(network), dtype=torch.float64)
        clipper.add_clipped_sum(total, network, CAPTIONS.losses(network), inputs_of(config, network, rows))
        return total

    moved = total_of([1, 2, 3, 9]) - total_of([1, 2, 3])
    assert 0.999 * 0.02 < float(moved.norm()) <= 0.02
    assert float((moved - total_of([9])).norm()) < 1e-6


def test_inputs_of_a_record_follow_neither_its_companions_nor_its_place() -> None:
    config = config_of(word_swap_prob=0.3)
    network = network_of(config)
    one = inputs_of(config, network, [4, 8, 15])
    other = inputs_of(config, network, [1, 0], RECORDS.take(np.array([15, 30])))
    for both, few in zip(one, other, strict=True):
        assert torch.equal(both[2], few[1])
    assert one[0].shape == (3, 1, 1, *SHAPE)
    assert one[1].shape == (3, 1, 1, network.max_tokens)


def test_tokens_are_padded_to_the_same_length_however_short_the_captions_are() -> None:
    config = config_of()
    network = network_of(config)
    short = dataclasses.replace(RECORDS, captions=(("a",),) * len(RECORDS))
    assert inputs_of(config, network, [0], short)[1].shape == inputs_of(config, network, [0])[1].shape


def _per_batch(network: Captioner, inputs: GroupInputs) -> Tensor:
    """As a loss would be that divides by the batch's tokens: of a short caption more is left by long ones."""
    images, tokens = (each.flatten(0, 2) for each in inputs)
    found = network.next_tokens(network(images, tokens), tokens)
    return -found.log_likelihoods.sum(1) / found.counts.float().sum(1).mean()


def _padded(network: Captioner, inputs: GroupInputs) -> Tensor:
    """As attention would be that lets a padded token look at the record behind its own."""
    images, tokens = (each.flatten(0, 2) for each in inputs)
    padding = (tokens == network.end_token).cumsum(1) > 0
    leaked = torch.where(padding, tokens.roll(1, 0), tokens)
    losses = torch.nn.functional.cross_entropy(
        network(images, leaked).transpose(1, 2), leaked[:, 1:], reduction="none"
    )
    return losses.mean(1)


@pytest.mark.parametrize("leak", [_per_batch, _padded])
def test_padding_that_leaks_into_another_record_is_refused(
    leak: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    network = network_of(config)
    CAPTIONS.check_network(config, network, SHAPE)

    def leaking(network: Captioner, precision: AnyNetworkConfig | None = None) -> Objective:
        return lambda inputs: leak(network, inputs)  # type: ignore[operator, no-any-return]

    monkeypatch.setattr(CAPTIONS, "losses", leaking)
    with pytest.raises(ConfigError, match="changed when another group changed"):
        CAPTIONS.check_network(config, network, SHAPE)


def test_mechanism_clips_each_record_with_sensitivity_c() -> None:
    for sampling in (None, "records", "groups"):
        mechanism = config_of(sampling=sampling, l2_clip_norm=0.5).mechanism
        assert mechanism.group_size == 1
        assert mechanism.sensitivity == 0.5
        assert mechanism.divisor == pytest.approx(16)
        assert mechanism.rules.clip_unit == "record"


# --- trainings ---


@pytest.mark.ci
def test_training_without_noise_lowers_the_loss() -> None:
    config = config_of(
        noise_multiplier=None,
        epsilon=math.inf,
        num_steps=25,
        learning_rate=5e-3,
        record_every_steps=1,
    )
    losses = [value for _, value in train(config, data_of()).series["train_loss"]]
    assert np.mean(losses[-3:]) < 0.75 * np.mean(losses[:3])


@pytest.mark.ci
def test_private_training_has_the_epsilon_of_its_steps_and_scores() -> None:
    found = train(config_of(), data_of(scored=True))
    assert 0 < found.metrics["epsilon"] < math.inf
    names = {"caption_token_probability", "next_token_accuracy", "word_order_accuracy", "zero_shot_accuracy"}
    names |= {"knn_accuracy", "linear_probe_accuracy"}
    assert names <= found.metrics.keys()
    assert all(0 <= found.metrics[name] <= 1 for name in names)


@pytest.mark.ci
def test_seeded_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    config = config_of(seeded_non_private=True, tie_embeddings=True)
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


def test_public_start_is_of_pairs_that_no_data_set_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPGCL_CACHE", str(tmp_path))
    first: list[int] = []

    def watched(*args: int, **options: int) -> ImageTextRecords:
        first.append(options["first"])
        return make_shape_pairs(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("trainers.data.shapes.make_shape_pairs", watched)
    monkeypatch.setattr("trainers.training.public_start.Recipe", partial(Recipe, batch_size=16))
    config = config_of(warm_start=Path("synthetic:12"))
    assert config.warm_start is not None
    assert not config.warm_start.from_records
    assert "generated pairs" in config.warm_start.origin
    assert len(first) == len(set(first)) == 12
    assert min(first) >= FIRST_UNUSED_SHAPE
    given = read_weights(Path(config.warm_start.path)).tensors
    started, fresh = (CAPTIONS.build(config, SHAPE, tensors) for tensors in (given, None))
    inputs = inputs_of(config, fresh, [0, 1, 2, 3])
    with torch.no_grad():
        before, after = (CAPTIONS.losses(network)(inputs).mean() for network in (fresh, started))
    assert float(after) < 0.9 * float(before)


# --- refused ---


def test_images_without_captions_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="dp_cap learns from captions, and the data are images without"):
        training_config(OPTIONS, num_records=40, public_seed=0)
    images = dataclasses.replace(data_of(), train=make_records(40))
    with pytest.raises(ConfigError, match="dp_cap learns from captions; got images without captions"):
        train(config_of(), images)


@pytest.mark.parametrize("network", ["tiny_cnn", "mae-toy", "clip-tiny"])
def test_network_of_another_task_is_refused(network: str) -> None:
    with pytest.raises(ConfigError, match=r"network of dp_cap.*cap-toy"):
        train(config_of(network=network), data_of())


def test_captioner_is_refused_by_contrastive_methods() -> None:
    config = config_of(method="dp_gcl", group_size=4, patch_size=None)
    with pytest.raises(ConfigError, match="cap-toy"):
        train(config, data_of())
    with pytest.raises(ConfigError, match=r"dp_gcl compares unit embeddings.*captions has none"):
        CAPTIONS.check(dataclasses.replace(config, network=CaptionerConfig()), RECORDS)


@pytest.mark.parametrize("changes", [{"patch_size": 8}, {"tie_embeddings": True, "network": "cap-tiny"}])
def test_warm_start_of_another_network_names_the_first_mismatch(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    torch.save(CAPTIONS.build(config_of(), SHAPE, None).state_dict(), tmp_path / "other.pt")
    config = config_of(warm_start=tmp_path / "other.pt", **changes)
    with pytest.raises(ConfigError, match=r"of the same network, but .* is not: .*: has \["):
        train(config, data_of())


def test_warm_start_of_another_task_names_the_first_mismatch(tmp_path: Path) -> None:
    torch.save({"hidden.weight": torch.zeros(1, 32)}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=r"is not: decoder\.0\..*: missing"):
        train(config_of(warm_start=tmp_path / "other.pt"), data_of())


def test_options_of_clip_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"per_tower_clipping needs a CLIP model.*got cap-toy"):
        config_of(per_tower_clipping=True)
    for changes in ({"learn_temperature": True}, {"pretrained": "laion2b_s34b_b79k"}):
        with pytest.raises(ConfigError, match="applies only to the CLIP models"):
            config_of(**changes)
    with pytest.raises(ConfigError, match=r"num_augmentations must be 0.*augments no keys"):
        config_of(num_augmentations=1)
    with pytest.raises(ConfigError, match=r"got a network without one.*Set the readout to pooled"):
        CAPTIONS.check_network(config_of(readout="grid4"), network_of(config_of()), SHAPE)


def test_public_start_of_pairs_refuses_images_that_are_not_made() -> None:
    for shape in ((1, 32, 32), (3, 32, 64), (3, 28, 28)):
        with pytest.raises(ConfigError, match="generates square colour images of 32 to 256 pixels"):
            recipe_of(CaptionerConfig(), shape, num_steps=20, seed=0)


@pytest.mark.ci
def test_sweep_takes_the_network_of_the_method_unless_another_is_given() -> None:
    given = ("--method", "dp_cap", "--group-sizes", "4", "--repeats", "1", "--no-non-private")
    given += ("--expected-batch-size", "50", "--num-steps", "2")
    for setting in ((), ("--setting", "paper")):
        (trial,) = support.plan("--dataset", "shapes:200", *given, "--tie-embeddings", *setting).trials
        network = trial.config.network
        assert isinstance(network, CaptionerConfig)
        assert (network.name, network.tie_embeddings) == ("cap-toy", True)
        assert trial.config.num_augmentations == 0
