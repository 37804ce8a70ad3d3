"""Public starts: made once of procedural images, kept by content, equal in all trials."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock, Timeout

from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.losses.image_text import image_text_group_loss
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.release.statement import RESEARCH
from sweeps.service.storage.sweep_folder import config_hash
from tests.sweeps import support
from tests.trainers.exporting import SMALL, same_weights
from trainers.config.networks import ClipNetworkConfig, NetworkConfig, NetworkOptions, ViewConfig
from trainers.config.nodes import OptimizerConfig
from trainers.config.presets import DIGITS_CPU, PAIRS_CPU
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data import procedural
from trainers.data.procedural import procedural_images
from trainers.data.shapes import (
    FIRST_UNUSED_SHAPE,
    MAX_SHAPE_PAIRS,
    NUM_TEST_SHAPES,
    make_shape_pairs,
)
from trainers.files.weights import read_note, read_weights, write_weights
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.models.clip.published_models import CLIP_NANO, COMMON_WORDS, ClipConfig, find_clip, shipped_path
from trainers.models.clip.tokens import ClipTokenizer
from trainers.models.encoder import Encoder, build_encoder
from trainers.training import public_start as made
from trainers.training.public_start import Recipe, pretrained, public_start, recipe_of
from trainers.training.resolve import training_config
from trainers.training.warm_start import starting_encoder, warm_start_note
from trainers.views.image_views import make_views, normalise

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

SHAPE = (1, 8, 8)
RECIPE = Recipe(
    network=NetworkConfig(name="tiny_cnn", embedding_dim=8),
    image_shape=SHAPE,
    num_steps=11,
    seed=0,
    batch_size=32,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("DPGCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that the tests of this file share: what one of them made is there for the others."""
    monkeypatch.setenv("DPGCL_CACHE", str(tmp_path_factory.getbasetemp() / "shared-starts"))


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that were trained, in order."""
    seen: list[Recipe] = []

    def counted(recipe: Recipe) -> Encoder:
        seen.append(recipe)
        return pretrained(recipe)

    monkeypatch.setattr(made, "pretrained", counted)
    return seen


def _untrained(recipe: Recipe = RECIPE) -> Encoder:
    assert isinstance(recipe.network, NetworkConfig)
    return build_encoder(recipe.network, recipe.image_shape, recipe.seed)


@torch.no_grad()
def _loss(encoder: Encoder) -> float:
    """The mean contrastive loss of 128 unseen images; log 128 = 4.9 by chance."""
    ids = np.arange(10_000, 10_128, dtype=np.uint64)
    images = torch.from_numpy(procedural_images(ids, SHAPE, seed=9))
    views = make_views(images, ids, config=RECIPE.views, seed=9, step=0, num_views=2)
    return float(two_view_group_loss(encoder.embed_views(views[None]), temperature=0.2)) / 128


def test_a_start_has_learned_what_its_loss_asks_for() -> None:
    recipe = dataclasses.replace(RECIPE, num_steps=40, batch_size=64)
    assert _loss(pretrained(recipe)) < _loss(_untrained()) - 0.15


@pytest.mark.parametrize(
    ("network", "channels"), [("tiny_cnn", 1), ("small_cnn", 3), ("wide_cnn", 1), ("resnet18", 3)]
)
def test_every_cnn_is_pretrained_in_every_weight(network: str, channels: int) -> None:
    config = NetworkConfig(name=network, embedding_dim=8)
    recipe = dataclasses.replace(RECIPE, network=config, image_shape=(channels, 8, 8), batch_size=4)
    before, after = _untrained(recipe).state_dict(), pretrained(recipe).state_dict()
    assert before.keys() == after.keys()
    assert not [name for name in before if torch.equal(before[name], after[name])]


def test_a_recipe_always_makes_the_same_weights() -> None:
    torch.manual_seed(1)
    first = pretrained(RECIPE)
    torch.manual_seed(2)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert same_weights(first.state_dict(), pretrained(RECIPE))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before)
    assert not same_weights(first.state_dict(), pretrained(dataclasses.replace(RECIPE, seed=1)))


OTHERS = {
    "network": NetworkConfig(name="small_cnn", embedding_dim=8),
    "image_shape": (3, 8, 8),
    "num_steps": 12,
    "seed": 1,
    "batch_size": 16,
    "temperature": 0.3,
    "optimizer": OptimizerConfig(learning_rate=1e-4, warmup_steps=10),
    "views": ViewConfig(flip_prob=0.1),
}


def test_all_that_decides_the_weights_decides_the_name_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OTHERS.keys() == {field.name for field in dataclasses.fields(Recipe)}
    keys = [dataclasses.replace(RECIPE, **{name: value}).key for name, value in OTHERS.items()]
    narrower = NetworkConfig(name="tiny_cnn", embedding_dim=4)
    keys.append(dataclasses.replace(RECIPE, network=narrower).key)
    for module in (made, procedural):
        with monkeypatch.context() as patch:
            patch.setattr(module, "VERSION", 1000)
            keys.append(RECIPE.key)
    assert len({*keys, RECIPE.key}) == len(keys) + 1
    assert RECIPE.key == dataclasses.replace(RECIPE).key


def test_a_start_is_made_once(trainings: list[Recipe]) -> None:
    path = public_start(RECIPE)
    assert public_start(RECIPE) == path
    assert trainings == [RECIPE]
    assert same_weights(read_weights(path).tensors, pretrained(RECIPE))  # type: ignore[arg-type]
    assert public_start(dataclasses.replace(RECIPE, seed=1)) != path
    assert len(trainings) == 2


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _of_another_recipe(path: Path) -> None:
    public_start(dataclasses.replace(RECIPE, seed=1)).replace(path)


def _without_a_note(path: Path) -> None:
    write_weights(path, read_weights(path).tensors, note="{}")


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _of_another_recipe, _without_a_note])
def test_a_file_that_is_not_what_it_should_be_is_made_again(damage: Callable[[Path], None]) -> None:
    content = (path := public_start(RECIPE)).read_bytes()
    damage(path)
    assert path.read_bytes() != content
    assert public_start(RECIPE) == path
    assert path.read_bytes() == content


def test_who_waited_for_another_process_takes_what_that_one_made(
    trainings: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = public_start(RECIPE)
    moved = path.rename(path.with_suffix(".elsewhere"))

    @contextlib.contextmanager
    def waited(place: Path) -> Iterator[None]:
        moved.rename(place)
        yield

    monkeypatch.setattr(made, "_file_lock", waited)
    assert public_start(RECIPE) == path
    assert trainings == [RECIPE]


def test_nobody_else_makes_a_start_meanwhile(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def held(recipe: Recipe) -> Encoder:
        (lock,) = cache.rglob("*.lock")
        with pytest.raises(Timeout):
            FileLock(lock).acquire(timeout=0)
        return _untrained(recipe)

    monkeypatch.setattr(made, "pretrained", held)
    assert public_start(RECIPE).exists()


def test_a_start_that_was_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def interrupted(recipe: Recipe) -> Encoder:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made, "pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            public_start(RECIPE)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert public_start(RECIPE).exists()


def test_a_cache_in_the_place_of_a_file_is_refused(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(StorageError, match="Set DPGCL_CACHE"):
        public_start(RECIPE)


def test_one_line_says_what_is_made_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    public_start(RECIPE)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "tiny_cnn for 11 steps on procedural images, only once, in about " in said.err
    public_start(RECIPE)
    assert capsys.readouterr().err == ""


# --- in sweeps and from Python ---


def _config(warm_start: str = "synthetic:11", **changes: object) -> TrainingConfig:
    setting = replace_options(
        DIGITS_CPU, **{"embedding_dim": 8, "noise_multiplier": 1.0, "warm_start": Path(warm_start)} | changes
    )
    return training_config(setting, num_records=1445, public_seed=0, image_shape=SHAPE)


def test_training_starts_from_the_made_weights(kept: None) -> None:
    config = _config()
    encoder = starting_encoder(config, SHAPE)
    assert config.warm_start is not None
    assert same_weights(read_weights(Path(config.warm_start.path)).tensors, encoder)  # type: ignore[arg-type]
    assert not same_weights(
        starting_encoder(dataclasses.replace(config, warm_start=None), SHAPE).state_dict(), encoder
    )


def test_all_trials_of_a_sweep_start_from_weights_that_were_made_once(trainings: list[Recipe]) -> None:
    plan = support.plan(*SMALL, "--warm-start", "synthetic:11", "--repeats", "2")
    assert len(plan.trials) > 2
    assert len(trainings) == 1
    first, *others = (starting_encoder(trial.config, SHAPE).state_dict() for trial in plan.trials)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    assert len({trial.config.public_seed for trial in plan.trials}) == 2
    (note,) = (note for note in plan.notes if note.startswith("Warm start"))
    assert "11 steps without privacy on procedural images" in note
    assert "Neither those images nor those weights come from any record" in note


def test_a_start_costs_no_privacy(kept: None) -> None:
    started, plain = _config(), dataclasses.replace(_config(), warm_start=None)
    assert started.mechanism == plain.mechanism
    assert started.epsilon() == plain.epsilon()
    assert config_hash(started) != config_hash(plain)
    assert started.as_params()["warm_start_origin"] == "11 steps without privacy on procedural images"
    assert plain.as_params()["warm_start_origin"] is None


def test_predictor_starts_fresh_behind_a_made_start(kept: None) -> None:
    config = _config(method="byol_groups", num_augmentations=0, group_size=1)
    assert config.warm_start is not None
    given, found = read_weights(Path(config.warm_start.path)).tensors, starting_encoder(config, SHAPE)
    assert found.predictor is not None
    assert all(torch.equal(found.state_dict()[name], value) for name, value in given.items())


def test_settings_of_a_training_make_no_other_start(trainings: list[Recipe]) -> None:
    hashes = {
        _config(**changes).warm_start_sha256 for changes in ({}, {"group_size": 2}, {"min_crop_area": 0.9})
    }
    assert (len(trainings), len(hashes)) == (1, 1)


@pytest.mark.parametrize("steps", ["", "0", "-5", "1.5", "1e3", "many", "１２", " 300"])
def test_steps_that_are_no_positive_whole_number_are_refused(steps: str) -> None:
    with pytest.raises(ConfigError, match="must be a positive integer, such as synthetic:300"):
        NetworkOptions(warm_start=Path(f"synthetic:{steps}"))


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"more than the 10 steps .* got 10\. Use"):
        _config("synthetic:10")


@pytest.mark.parametrize("network", ["vit_b_32_lora", "trainers.models.small_cnn:tiny_cnn"])
def test_networks_that_are_not_pretrained_here_are_refused_with_those_that_are(network: str) -> None:
    with pytest.raises(ConfigError, match="resnet18, small_cnn, tiny_cnn, wide_cnn"):
        _config(network=network)


def _of_pairs(**changes: object) -> TrainingConfig:
    options = replace_options(PAIRS_CPU, noise_multiplier=1.0, warm_start=Path("synthetic:30"), **changes)
    return training_config(
        options, num_records=2000, public_seed=0, modality="image-text", image_shape=(3, 32, 32)
    )


def test_clip_model_starts_from_generated_pairs_that_no_data_set_holds(
    monkeypatch: pytest.MonkeyPatch, trainings: list[Recipe]
) -> None:
    monkeypatch.setattr(made, "Recipe", partial(Recipe, batch_size=32))
    config = _of_pairs(lora_rank=2)
    assert config.warm_start is not None
    assert "30 steps without privacy on generated pairs" in config.warm_start.origin
    unseen = make_shape_pairs(64, seed=0, first=2**19, vocabulary="common")
    images = normalise(torch.from_numpy(np.asarray(unseen.images)))

    @torch.no_grad()
    def loss(config: TrainingConfig) -> float:
        network = starting_encoder(config, (3, 32, 32))
        assert isinstance(network, ImageTextEncoder)
        tokens = network.tokenizer([text for text, *_ in unseen.captions]).tokens
        both = torch.stack([network.embed_images(images), network.embed_texts(tokens)], dim=1)
        return float(image_text_group_loss(both[None], temperature=0.2)) / 128

    # log 64 = 4.2 by chance; adapters change nothing until they are trained
    assert loss(config) < loss(dataclasses.replace(config, warm_start=None)) - 0.1
    assert _of_pairs(lora_rank=0).warm_start == config.warm_start
    assert len(trainings) == 1


def test_pairs_of_a_start_are_in_no_data_set_of_shapes() -> None:
    recipe = recipe_of(ClipNetworkConfig(), (1, 28, 28), num_steps=20, seed=0)
    assert recipe.image_shape == (3, 32, 32)
    seen = [made._pairs(recipe, step).ids for step in (0, 1)]
    assert len(np.unique(np.concatenate(seen))) == 2 * recipe.batch_size
    assert FIRST_UNUSED_SHAPE >= MAX_SHAPE_PAIRS + NUM_TEST_SHAPES


def test_smallest_clip_model_starts_from_pairs_that_its_context_holds() -> None:
    recipe = recipe_of(ClipNetworkConfig(name=CLIP_NANO), (3, 32, 32), num_steps=20, seed=0)
    captions = [caption for (caption,) in made._pairs(recipe, 0).captions]
    tokens = ClipTokenizer(find_clip(ClipConfig(model=CLIP_NANO)))(captions)
    assert tokens.num_truncated == 0
    said = " ".join(captions)
    assert "circle" in said
    assert "ring" not in said  # a word that is not common


def test_weights_of_the_package_are_those_of_the_recipe_that_their_file_states() -> None:
    note = json.loads(read_note(shipped_path(CLIP_NANO, COMMON_WORDS)) or "{}")
    recipe = recipe_of(ClipNetworkConfig(name=CLIP_NANO), (3, 32, 32), num_steps=1200, seed=0)
    assert note == {"data": RESEARCH, "recipe": recipe.content}


def test_large_clip_models_are_refused_with_those_that_are_pretrained() -> None:
    with pytest.raises(ConfigError, match=r"small CLIP models clip-tiny, .*; got ViT-B-32\. Start"):
        _of_pairs(network="ViT-B-32")


def test_a_start_for_images_of_no_shape_is_refused() -> None:
    setting = replace_options(DIGITS_CPU, noise_multiplier=1.0, warm_start=Path("synthetic:11"))
    with pytest.raises(ConfigError, match="Pass the image_shape"):
        training_config(setting, num_records=1445, public_seed=0)


@pytest.mark.parametrize(("network", "shape"), [("small_cnn", SHAPE), ("tiny_cnn", (3, 8, 8))])
def test_a_start_of_another_network_or_shape_is_refused(
    network: str, shape: tuple[int, int, int], kept: None
) -> None:
    other = NetworkConfig(name=network, embedding_dim=8)
    config = dataclasses.replace(_config(), network=other)
    with pytest.raises(ConfigError, match="of the same network"):
        starting_encoder(config, shape)


def test_the_note_of_a_file_still_speaks_of_its_data(tmp_path: Path) -> None:
    torch.save(_untrained().state_dict(), tmp_path / "weights.pt")
    assert "not the data that those weights" in str(warm_start_note(_config(str(tmp_path / "weights.pt"))))
