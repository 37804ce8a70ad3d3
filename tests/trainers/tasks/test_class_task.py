"""Classes: each record's loss and clipped gradient are of its own image and label, and training learns."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpgcl_core.clipping.clipper import ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.release.metrics import CLASSIFIER_SCORE
from tests.sweeps import support
from tests.trainers.exporting import write_small_clip
from trainers.config.networks import ClassifierConfig
from trainers.config.settings import TrainingOptions
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data.dataset import TrainingData, num_public_classes
from trainers.data.procedural import procedural_images
from trainers.data.records import Records
from trainers.data.shapes import make_shape_pairs
from trainers.evaluation.classifier_scores import own_scores
from trainers.files.checkpoint import CheckpointFolder
from trainers.models.classifier import RIDGE, Classifier
from trainers.tasks import CLASSES
from trainers.training.loop import train
from trainers.training.resolve import training_config
from trainers.training.warm_start import starting_encoder
from trainers.views.image_views import normalise

pytestmark = pytest.mark.ci

SHAPE = (1, 8, 8)
NUM_CLASSES = 3
OPTIONS = replace_options(
    TrainingOptions(),
    method="dp_classifier",
    network="tiny_cnn",
    embedding_dim=8,
    patch_size=4,
    num_classes=NUM_CLASSES,
    num_augmentations=0,
    noise_multiplier=1.0,
    expected_batch_size=16,
    num_steps=4,
    max_views_per_microbatch=8,
    also_untrained=False,
)


def records_of(count: int = 40, *, classes: int = NUM_CLASSES) -> Records:
    ids = np.arange(count, dtype=np.uint64)
    labels = (ids % classes).astype(np.int64)
    return Records(images=procedural_images(ids, SHAPE, seed=3), ids=ids, labels=labels)


def config_of(**changes: object) -> TrainingConfig:
    return training_config(replace_options(OPTIONS, **changes), num_records=40, public_seed=0)


def data_of(records: Records | None = None, *, scored: bool = False, public: bool = True) -> TrainingData:
    records = records or records_of()
    shown = records if scored else None
    return TrainingData(
        train=records, index=shown, queries=shown, train_is_public=public, evaluation_is_public=public
    )


def network_of(config: TrainingConfig) -> Classifier:
    """At weights that give every trained parameter a gradient."""
    network = CLASSES.build(config, SHAPE, None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network


def inputs_of(
    config: TrainingConfig, network: Classifier, rows: list[int], records: Records | None = None
) -> tuple[Tensor, ...]:
    groups = np.array(rows)[:, None]
    records = records or records_of()
    found = CLASSES.inputs(config, network, records, groups, step=2, num_augmentations=0)
    assert isinstance(found, tuple)
    return found


def oracle(network: Classifier, inputs: tuple[Tensor, ...], l2_clip_norm: float) -> Tensor:
    """Each record's loss from its own image and label, each record's gradient by itself, in float64."""
    total = torch.zeros(num_trainable(network), dtype=torch.float64)
    for images, targets in zip(*inputs, strict=True):
        logits = network(images[0])[0]
        loss = logits.exp().sum().log() - logits[int(targets[0, 0].argmax())]
        gradients = torch.autograd.grad(loss, trainable_parameters(network))
        flat = torch.cat([each.flatten().double() for each in gradients])
        total += flat * min(1.0, l2_clip_norm * (1 - 1e-4) / float(flat.norm()))
    return total


@pytest.mark.parametrize(
    ("network_name", "layers", "l2_clip_norm"),
    [
        ("tiny_cnn", "head", 0.02),
        ("tiny_cnn", "all", 0.02),
        ("tiny_cnn", "all", 50.0),
        ("mae-toy", "all", 0.02),
    ],
)
def test_clipped_sum_equals_oracle_with_every_trained_layer_in_the_fast_path(
    network_name: str, layers: str, l2_clip_norm: float
) -> None:
    config = config_of(network=network_name, trained_layers=layers)
    network = network_of(config)
    inputs, total = inputs_of(config, network, [0, 5, 7, 30]), torch.zeros(num_trainable(network))
    clipper = GroupClipper(l2_clip_norm=l2_clip_norm)
    report = clipper.add_clipped_sum(total, network, CLASSES.losses(network), inputs)
    expected = oracle(network, inputs, l2_clip_norm)
    assert float((total.double() - expected).norm() / expected.norm()) < 1e-5
    assert ONE_BY_ONE not in report.paths.values()
    weights = {name: p for name, p in network.named_parameters() if p.requires_grad and p.ndim > 1}
    assert {name.removesuffix(".weight") for name in weights} <= report.paths.keys()


def test_one_more_record_moves_the_sum_by_its_own_clipped_gradient() -> None:
    """The companions' contributions are the same bits with and without it: sensitivity C, attained."""
    config = config_of(trained_layers="all")
    network, clipper = network_of(config), GroupClipper(l2_clip_norm=0.02)

    def total_of(rows: list[int]) -> Tensor:
        total = torch.zeros(num_trainable(network), dtype=torch.float64)
        clipper.add_clipped_sum(total, network, CLASSES.losses(network), inputs_of(config, network, rows))
        return total

    moved = total_of([1, 2, 3, 9]) - total_of([1, 2, 3])
    assert 0.999 * 0.02 < float(moved.norm()) <= 0.02
    assert float((moved - total_of([9])).norm()) < 1e-6


def test_label_of_a_record_moves_its_own_loss_alone() -> None:
    config = config_of()
    network, records = network_of(config), records_of()
    labels = records.labels
    assert labels is not None
    others = dataclasses.replace(records, labels=np.where(records.ids == 5, (labels + 1) % 3, labels))
    losses = CLASSES.losses(network)
    one, other = (losses(inputs_of(config, network, [4, 5, 6], each)) for each in (records, others))
    assert (one != other).tolist() == [False, True, False]


def test_views_and_labels_of_a_record_follow_neither_its_companions_nor_its_place() -> None:
    config = config_of()
    network = network_of(config)
    one, other = inputs_of(config, network, [4, 8, 15]), inputs_of(config, network, [30, 15])
    for both, few in zip(one, other, strict=True):
        assert both.shape[:3] == (3, 1, 1)
        assert torch.equal(both[2], few[1])


def test_label_is_that_of_the_row_which_stands_for_the_record() -> None:
    """A person has images of every class: at each step one of them is shown, with its own label."""
    labels = np.arange(30, dtype=np.int64) % 5
    images = np.broadcast_to(labels[:, None, None, None].astype(np.uint8), (30, *SHAPE)).copy()
    ids, starts = np.arange(6, dtype=np.uint64), np.arange(0, 31, 5)
    records = Records(images=images, ids=ids, labels=labels, row_starts=starts)
    seen = set()
    for step in range(8):
        shown = records.images_at(np.arange(6), seed=0, step=step)[:, 0, 0, 0]
        given = records.labels_at(np.arange(6), seed=0, step=step)
        assert shown.tolist() == given.tolist()
        seen |= set(given.tolist())
    assert len(seen) > 2


def test_network_in_which_labels_or_images_meet_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    network = network_of(config)
    CLASSES.check_network(config, network, SHAPE)

    def weighted(own: Classifier, *_: object) -> object:
        def losses(inputs: tuple[Tensor, ...]) -> Tensor:
            images, targets = (each.flatten(0, 2) for each in inputs)
            often = (targets * targets.sum(0)).sum(1)
            return F.cross_entropy(own(images), targets, reduction="none") / often

        return losses

    monkeypatch.setattr(CLASSES, "losses", weighted)
    with pytest.raises(ConfigError, match="must not depend on other records"):
        CLASSES.check_network(config, network, SHAPE)


@pytest.mark.ci
@pytest.mark.parametrize("layers", ["head", "all"])
def test_training_moves_the_layers_that_are_asked_for_and_no_others(layers: str) -> None:
    config = config_of(trained_layers=layers, record_every_steps=0)
    before = CLASSES.build(config, SHAPE, None).state_dict()
    after = train(config, data_of()).encoder.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    heads = {"classify.weight", "classify.bias"}
    read = {name for name in before if name.startswith("encoder.backbone.")}
    assert moved == (heads if layers == "head" else heads | read)
    assert any(name.startswith("encoder.head.") for name in before)


@pytest.mark.parametrize("network", ["mae-toy", "cap-toy"])
def test_what_the_features_do_not_read_takes_no_noise(network: str) -> None:
    classifier = CLASSES.build(config_of(network=network, trained_layers="all"), SHAPE, None)
    trained = {name.split(".")[1] for name, p in classifier.named_parameters() if p.requires_grad}
    assert trained == {"embed", "encoder", "norm", "weight", "bias"}


def test_mechanism_clips_each_record_with_sensitivity_c() -> None:
    for sampling in (None, "records", "groups"):
        mechanism = config_of(sampling=sampling, l2_clip_norm=0.5).mechanism
        assert mechanism.group_size == 1
        assert mechanism.sensitivity == 0.5
        assert mechanism.rules.clip_unit == "record"


def test_training_learns_the_labels_without_noise() -> None:
    images = np.zeros((40, *SHAPE), dtype=np.uint8)
    labels = np.arange(40, dtype=np.int64) % 2
    images[labels == 1] = 200
    records = Records(images=images, ids=np.arange(40, dtype=np.uint64), labels=labels)
    config = config_of(
        noise_multiplier=None,
        epsilon=math.inf,
        num_classes=2,
        num_steps=12,
        learning_rate=0.1,
        brightness=0.0,
        record_every_steps=0,
    )
    metrics = train(config, data_of(records, scored=True)).metrics
    assert metrics["classifier_accuracy"] == 1.0
    assert {"knn_accuracy", "linear_probe_accuracy"} <= metrics.keys()


def test_number_of_classes_is_that_of_public_data_and_never_read_from_private_ones() -> None:
    assert num_public_classes(data_of()) == NUM_CLASSES
    assert num_public_classes(data_of(public=False)) is None
    named = dataclasses.replace(data_of(), train_class_names=("a", "b", "c", "d"))
    assert num_public_classes(named) == 4
    with pytest.raises(ConfigError, match=r"must not be read from private labels.*Set --num-classes"):
        config_of(num_classes=None)
    found = training_config(
        replace_options(OPTIONS, num_classes=None), num_records=40, public_seed=0, num_classes=7
    ).network
    assert isinstance(found, ClassifierConfig)
    assert found.num_classes == 7


@pytest.mark.ci
def test_seeded_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    config = config_of(seeded_non_private=True, trained_layers="all")
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
    found = train(config_of(precision=precision, trained_layers="all"), data_of())
    assert all(torch.isfinite(p).all() for p in found.encoder.parameters())


@pytest.mark.ci
@pytest.mark.parametrize("layers", ["head", "all"])
def test_image_tower_of_a_clip_model_is_classified_without_its_text_tower(layers: str) -> None:
    ids = np.arange(40, dtype=np.uint64)
    images = procedural_images(ids, (3, 32, 32), seed=3)
    records = Records(images=images, ids=ids, labels=(ids % 3).astype(np.int64))
    config = config_of(network="clip-tiny", trained_layers=layers)
    network = CLASSES.build(config, (3, 32, 32), None)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    tower = {name for name in trained if name.startswith("encoder.clip.visual.")}
    assert trained == {"classify.weight", "classify.bias"} | tower
    assert bool(tower) == (layers == "all")
    found = train(config, data_of(records, scored=True)).metrics
    assert 0 <= found["classifier_accuracy"] <= 1
    with pytest.raises(ConfigError, match="reads images of 32 × 32 pixels"):
        train(config, data_of())


@pytest.mark.ci
def test_exported_clip_model_gives_the_classifier_its_image_tower(tmp_path: Path) -> None:
    clip = write_small_clip(tmp_path / "clip", lora=None)
    config = config_of(network="clip-tiny", warm_start=tmp_path / "clip")
    network = starting_encoder(config, (3, 32, 32))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(network.features(images), clip.features(images), atol=1e-5)
    assert not any(p.requires_grad for p in network.encoder.parameters())  # type: ignore[union-attr]


@pytest.mark.ci
def test_public_start_is_the_encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGCL_CACHE", str(tmp_path))
    options = replace_options(OPTIONS, warm_start=Path("synthetic:12"))
    config = training_config(options, num_records=40, public_seed=0, image_shape=SHAPE)
    assert config.warm_start is not None
    assert "procedural images" in config.warm_start.origin
    assert CLASSES.fresh_parts(config) == "the classification head"
    metrics = train(config, data_of(scored=True)).metrics
    assert metrics["epsilon"] > 0


# --- refused ---


def test_labels_that_are_missing_or_outside_are_refused_without_telling_any() -> None:
    config = config_of()
    with pytest.raises(ConfigError, match="dp_classifier learns labels; got images without labels"):
        CLASSES.check(config, dataclasses.replace(records_of(), labels=None))
    for label in (-1, NUM_CLASSES):
        labels = np.where(np.arange(40) == 17, label, 0)
        with pytest.raises(ConfigError, match=r"from 0 to below num_classes = 3; got others") as refused:
            CLASSES.check(config, dataclasses.replace(records_of(), labels=labels))
        assert not {"17", "40", "1 of", str(label)} & set(str(refused.value).replace("= 3", "").split())


def test_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="dp_classifier learns labels of images; got pairs"):
        CLASSES.check(config_of(), make_shape_pairs(4, seed=0, image_size=32))


def test_private_labels_that_are_numbered_by_the_data_are_refused() -> None:
    text = dataclasses.replace(records_of(), classes_from_data=True)
    with pytest.raises(ConfigError, match=r"got text labels.*one record could change the labels of others"):
        train(config_of(), data_of(text, public=False))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"num_classes": 1}, "num_classes must be at least 2; got 1"),
        ({"trained_layers": "tail"}, r"unknown trained_layers 'tail'.*all, head"),
        ({"num_augmentations": 1}, "num_augmentations must be 0.*augments no keys"),
        ({"learn_temperature": True}, "applies only to the CLIP models"),
        ({"pretrained": "laion2b_s34b_b79k"}, "applies only to CLIP models"),
        ({"method": "dp_gcl", "group_size": 4}, "num_classes applies only to the classifiers"),
    ],
)
def test_options_that_break_a_rule_are_refused(changes: dict[str, object], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        config_of(**changes)


@pytest.mark.ci
def test_unknown_network_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown network of dp_classifier 'tiny_cn'; did you mean 'tiny_cnn'"
    ):
        config_of(network="tiny_cn")


def test_readout_of_a_feature_map_is_refused() -> None:
    config = config_of(readout="grid4")
    with pytest.raises(ConfigError, match=r"got a network without one.*Set the readout to pooled"):
        CLASSES.check_network(config, network_of(config), SHAPE)


def test_other_methods_have_no_objective_of_classes() -> None:
    contrastive = replace_options(OPTIONS, method="dp_gcl", group_size=4, num_classes=None)
    config = training_config(contrastive, num_records=40, public_seed=0)
    mismatched = dataclasses.replace(config, network=config_of().network)
    with pytest.raises(ConfigError, match="dp_gcl compares unit embeddings, but the task classes has none"):
        CLASSES.check(mismatched, records_of())


@pytest.mark.parametrize("network", ["tiny_cnn", "mae-toy"])
def test_warm_start_of_another_network_names_the_first_mismatch(network: str, tmp_path: Path) -> None:
    other = config_of(network="mae-toy", patch_size=2)
    torch.save(CLASSES.build(other, SHAPE, None).encoder.state_dict(), tmp_path / "other.pt")
    config = config_of(network=network, warm_start=tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=r"of the same network, but .* is not: .*weight"):
        train(config, data_of())


def test_warm_start_gives_the_encoder_its_weights_and_a_classifier_all_of_them(tmp_path: Path) -> None:
    trained = network_of(config_of(trained_layers="all"))
    torch.save(trained.encoder.state_dict(), tmp_path / "encoder.pt")
    torch.save(trained.state_dict(), tmp_path / "classifier.pt")
    found = {}
    for name in ("encoder", "classifier"):
        config = config_of(warm_start=tmp_path / f"{name}.pt")
        given = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        state = CLASSES.build(config, SHAPE, given).state_dict()
        found[name] = {key for key, value in trained.state_dict().items() if torch.equal(value, state[key])}
        assert CLASSES.fresh_parts(config) == ("" if name == "classifier" else "the classification head")
    assert found["encoder"] == {key for key in trained.state_dict() if key.startswith("encoder.")}
    assert found["classifier"] == trained.state_dict().keys()


def test_sweep_stands_on_the_network_of_the_setting_and_counts_public_classes() -> None:
    given = ("--method", "dp_classifier", "--group-sizes", "4", "--repeats", "1", "--no-non-private")
    given += ("--noise-multiplier", "2")
    plan = support.plan("--dataset", "digits", *given)
    (trial,) = plan.trials
    assert isinstance(trial.config.network, ClassifierConfig)
    assert (trial.config.network.name, trial.config.network.num_classes) == ("tiny_cnn", 10)
    assert trial.config.num_augmentations == 0
    assert "One record is one image with its label: both are protected together." in plan.notes
    assert plan.row == "image with its label"


# --- the fixed map between features and classes ---


def test_features_of_procedural_images_come_out_white() -> None:
    network = CLASSES.build(config_of(network="mae-toy", patch_size=2), SHAPE, None).eval()
    images = procedural_images(np.arange(512, dtype=np.uint64), SHAPE, seed=0)
    with torch.no_grad():
        white = network.whiten(network.features(normalise(torch.from_numpy(images)))).double()
    assert float(white.mean(0).abs().max()) < 1e-2
    deviations = torch.linalg.eigvalsh(torch.cov(white.T))
    assert float(deviations.max()) < 1.01
    assert float(deviations.median()) > 0.1  # what hardly varies is shrunk by the ridge


def test_feature_that_is_constant_on_procedural_images_is_not_stretched() -> None:
    class Half(torch.nn.Module):
        feature_dim = 2

        def features(self, images: Tensor) -> Tensor:
            return torch.stack([images.mean((1, 2, 3)), images[:, 0, 0, 0].clamp_min(5.0)], dim=1)

    network = Classifier(Half(), SHAPE, num_classes=2, trained_layers="head")
    network.whiten_by(torch.linspace(-1, 1, 8).reshape(8, 1, 1, 1).expand(8, *SHAPE))
    assert float(network.whiten.weight.abs().max()) <= 2 / RIDGE / 0.1
    network.whiten_by(torch.zeros(4, *SHAPE))  # nothing varies at all
    assert torch.isfinite(network.whiten.weight).all()


@pytest.mark.parametrize("layers", ["head", "all"])
def test_fixed_map_is_the_same_whatever_the_records_and_after_training(layers: str) -> None:
    config = config_of(trained_layers=layers, epsilon=math.inf, noise_multiplier=None)
    before = CLASSES.build(config, SHAPE, None).whiten
    records = records_of(40)
    others = dataclasses.replace(records, images=255 - records.images)
    for each in (records, others):
        after = train(config, data_of(each)).encoder
        assert isinstance(after, Classifier)
        assert torch.equal(after.whiten.weight, before.weight)
        assert torch.equal(after.whiten.bias, before.bias)
        assert not torch.equal(after.classify.weight, torch.zeros_like(after.classify.weight))


def test_no_noise_falls_on_the_fixed_map() -> None:
    network = CLASSES.build(config_of(), SHAPE, None)
    assert num_trainable(network) == NUM_CLASSES * (network.feature_dim + 1)


def test_accuracy_is_that_of_the_logits() -> None:
    network = network_of(config_of())
    images = procedural_images(np.arange(30, dtype=np.uint64), SHAPE, seed=0)
    network.whiten_by(normalise(torch.from_numpy(images)) * 2)
    with torch.no_grad():
        views = normalise(torch.from_numpy(records_of().images))
        answers, features = network(views).argmax(1).numpy(), network.features(views).numpy()
    assert len(set(answers.tolist())) > 1
    for labels, accuracy in ((answers, 1.0), ((answers + 1) % NUM_CLASSES, 0.0)):
        assert own_scores(network, features, labels)[CLASSIFIER_SCORE] == accuracy
