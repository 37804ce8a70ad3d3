"""Starting from public weights: those and no others, known by their content, and never private ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.ledger.chain import Head
from dpgcl_core.release.metrics import is_reference
from dpgcl_core.workers import SingleWorker
from sweeps.service.storage.sweep_folder import config_hash
from tests.sweeps import support
from tests.trainers.conftest import make_config, make_data
from tests.trainers.exporting import LORA, SMALL, same_weights, write_small_clip, write_small_model
from tests.trainers.files.test_checkpoint import _crashed, _folder
from trainers.config.networks import PrivateStart
from trainers.config.presets import DIGITS_CPU
from trainers.config.training import (
    ClipNetworkConfig,
    EvaluationConfig,
    NetworkConfig,
    TextViewConfig,
    TrainingConfig,
)
from trainers.config.tree import replace_options
from trainers.models.clip.clip_encoder import ImageTextEncoder, synthetic_pairs
from trainers.models.encoder import build_encoder
from trainers.tasks.task import task_of
from trainers.tasks.task_scores import all_scores
from trainers.training.loop import train
from trainers.training.resolve import training_config
from trainers.training.step import prepare
from trainers.training.warm_start import read_warm_start, starting_encoder, warm_start_note

SHAPE = (1, 8, 8)


def _config(path: Path, **changes: object) -> TrainingConfig:
    network = NetworkConfig(name="tiny_cnn", embedding_dim=8)
    return make_config(**{"network": network, "warm_start": read_warm_start(path)} | changes)


def _own_state(seed: int = 3) -> dict[str, Tensor]:
    return build_encoder(NetworkConfig(name="tiny_cnn", embedding_dim=8), SHAPE, seed).state_dict()


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """An exported model of public data."""
    write_small_model(tmp_path / "public")
    return tmp_path / "public"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """An exported model of private data."""
    write_small_model(tmp_path / "private", data="private")
    return tmp_path / "private"


def test_training_starts_from_the_given_weights(public: Path) -> None:
    run = prepare(_config(public), make_data(), SingleWorker())
    assert same_weights(_own_state(), run.encoder)
    assert not same_weights(_own_state(), starting_encoder(_config(public, warm_start=None), SHAPE))


def test_setting_brings_the_weights_to_the_training(public: Path) -> None:
    setting = replace_options(DIGITS_CPU, embedding_dim=8, noise_multiplier=1.0, warm_start=public)
    config = training_config(setting, num_records=1445, public_seed=0)
    assert same_weights(_own_state(), starting_encoder(config, SHAPE))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_file_of_weights_is_taken_like_a_folder(public: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(_own_state(), path)
    else:
        shutil.copy(public / "model.safetensors", path)
    assert same_weights(_own_state(), starting_encoder(_config(path), SHAPE))


def test_backbones_own_state_is_taken_and_the_head_is_fresh(tmp_path: Path) -> None:
    backbone = {k.removeprefix("backbone."): v for k, v in _own_state().items() if k.startswith("backbone.")}
    torch.save(backbone, tmp_path / "weights.pt")
    found = starting_encoder(_config(tmp_path / "weights.pt"), SHAPE)
    fresh = starting_encoder(_config(tmp_path / "weights.pt", warm_start=None), SHAPE)
    assert all(torch.equal(value, backbone[name]) for name, value in found.backbone.state_dict().items())
    assert torch.equal(found.head[0].weight, fresh.head[0].weight)


def test_head_of_another_width_is_fresh(public: Path) -> None:
    config = _config(public, network=NetworkConfig(name="tiny_cnn", embedding_dim=4))
    found = starting_encoder(config, SHAPE)
    fresh = starting_encoder(dataclasses.replace(config, warm_start=None), SHAPE)
    assert same_weights(fresh.head.state_dict(), found.head)  # type: ignore[arg-type]
    own = _own_state()
    assert all(torch.equal(v, own[f"backbone.{k}"]) for k, v in found.backbone.state_dict().items())


def test_predictor_is_always_fresh(public: Path) -> None:
    network = NetworkConfig(name="tiny_cnn", embedding_dim=8, predictor=True)
    mechanism = dataclasses.replace(make_config().mechanism, method="byol_groups")
    config = _config(public, network=network, mechanism=mechanism, num_augmentations=0)
    found = starting_encoder(config, SHAPE).state_dict()
    own = _own_state()
    assert own.keys() < found.keys()
    assert all(torch.equal(found[name], value) for name, value in own.items())


def test_other_network_is_refused_with_both_shapes(public: Path) -> None:
    config = _config(public, network=NetworkConfig(name="small_cnn", embedding_dim=8))
    with pytest.raises(ConfigError, match=r"backbone\.\S+: has \[.*\], needs \[.*\]") as caught:
        starting_encoder(config, SHAPE)
    assert "more" in str(caught.value)


def test_head_of_the_right_width_must_fit_whole(tmp_path: Path) -> None:
    torch.save({k: v for k, v in _own_state().items() if k != "head.0.bias"}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"head\.0\.bias: missing"):
        starting_encoder(_config(tmp_path / "weights.pt"), SHAPE)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    state = _own_state()
    state["head.0.bias"][0] = torch.nan
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"finite; head\.0\.bias .* is not"):
        starting_encoder(_config(tmp_path / "weights.pt"), SHAPE)


def test_model_of_private_data_is_refused(private: Path) -> None:
    with pytest.raises(ConfigError, match="ε would have to be added"):
        read_warm_start(private)


def test_weights_of_private_data_are_refused_wherever_they_are_copied(private: Path, tmp_path: Path) -> None:
    shutil.copy(private / "model.safetensors", tmp_path / "innocent.safetensors")
    with pytest.raises(ConfigError, match="comes from private data"):
        read_warm_start(tmp_path / "innocent.safetensors")


def test_file_beside_a_private_statement_is_refused(tmp_path: Path) -> None:
    release = tmp_path / "release"
    release.mkdir()
    (release / "privacy_statement.json").write_text(json.dumps({"data": "private"}))
    torch.save(_own_state(), release / "model.pt")
    (tmp_path / "link.pt").symlink_to(release / "model.pt")
    for path in (release / "model.pt", tmp_path / "link.pt"):
        with pytest.raises(ConfigError, match="comes from private data"):
            read_warm_start(path)


def test_checkpoint_of_a_training_is_refused(tmp_path: Path) -> None:
    train(make_config(seeded_non_private=True), make_data(), checkpoints=_folder(tmp_path))
    with pytest.raises(StorageError, match="the checkpoint of a training"):
        read_warm_start(tmp_path / "checkpoint.pt")


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    torch.save({"backbone.weight": Evil()}, tmp_path / "weights.pt")
    with pytest.raises(StorageError, match="cannot be read"):
        read_warm_start(tmp_path / "weights.pt")
    assert not (tmp_path / "ran").exists()


def test_changed_weights_are_refused_where_they_are_loaded(tmp_path: Path) -> None:
    torch.save(_own_state(), tmp_path / "weights.pt")
    config = _config(tmp_path / "weights.pt")
    torch.save(_own_state(seed=4), tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="planned with"):
        starting_encoder(config, SHAPE)


def test_weights_that_a_worker_does_not_see_are_refused(tmp_path: Path) -> None:
    torch.save(_own_state(), tmp_path / "weights.pt")
    config = _config(tmp_path / "weights.pt")
    (tmp_path / "weights.pt").unlink()
    with pytest.raises(StorageError, match="where every machine"):
        starting_encoder(config, SHAPE)


def test_configuration_is_told_by_the_content_and_not_by_the_path(public: Path, tmp_path: Path) -> None:
    shutil.copytree(public, tmp_path / "moved")
    write_small_model(tmp_path / "other", state=_own_state(seed=4))
    hashes = [config_hash(_config(folder)) for folder in (public, tmp_path / "moved", tmp_path / "other")]
    assert hashes[0] == hashes[1] != hashes[2]
    assert config_hash(_config(public, warm_start=None)) not in hashes


def test_params_show_the_hash_of_the_weights(public: Path) -> None:
    sha256 = json.loads((public / "model.json").read_text())["sha256"]
    assert _config(public).as_params()["warm_start"] == sha256
    assert make_config().as_params()["warm_start"] is None


def test_statement_tells_of_the_warm_start(public: Path) -> None:
    plan = support.plan(*SMALL, "--warm-start", str(public))
    assert warm_start_note(_config(public)) in plan.notes  # which the statement ends with


def test_note_tells_whose_word_there_is_for_the_weights(public: Path, tmp_path: Path) -> None:
    torch.save(_own_state(), tmp_path / "weights.pt")
    for path, word in ((public, "exported model of sweep one"), (tmp_path / "weights.pt", "on the word of")):
        note = str(warm_start_note(_config(path)))
        assert word in note
        assert read_warm_start(path).sha256 in note


def test_plan_refuses_weights_that_do_not_fit(public: Path) -> None:
    with pytest.raises(ConfigError, match="of the same network"):
        support.plan(*SMALL, "--network", "small_cnn", "--warm-start", str(public))


@pytest.mark.ci
def test_checkpoint_wins_over_the_warm_start(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"network": NetworkConfig(name="tiny_cnn", embedding_dim=8), "seeded_non_private": True}
    changes |= {"warm_start": read_warm_start(public)}
    whole = train(make_config(**changes), make_data()).encoder
    _crashed(monkeypatch, tmp_path / "a", 3, **changes)
    resumed = train(make_config(**changes), make_data(), checkpoints=_folder(tmp_path / "a")).encoder
    assert same_weights(whole.state_dict(), resumed)


def test_nothing_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_warm_start(tmp_path / "none")


# --- CLIP models ---


def _clip_config(path: Path | None, **network: Any) -> TrainingConfig:
    start = None if path is None else read_warm_start(path)
    return make_config(
        network=ClipNetworkConfig(**{"lora_rank": 2} | network), text_views=TextViewConfig(), warm_start=start
    )


def _started(config: TrainingConfig) -> Tensor:
    """The embeddings of both towers before step 0, `[2n, dim]`."""
    encoder = starting_encoder(config, (3, 32, 32))
    assert isinstance(encoder, ImageTextEncoder)
    return _embeddings(encoder)


@torch.no_grad()
def _embeddings(encoder: ImageTextEncoder) -> Tensor:
    images, tokens = synthetic_pairs(encoder)
    return torch.cat([encoder.embed_images(images), encoder.embed_texts(tokens)])


@pytest.mark.parametrize("file", ["", "open_clip_model.safetensors"])
def test_clip_training_starts_from_an_exported_clip_model(tmp_path: Path, file: str) -> None:
    trained = write_small_clip(tmp_path / "m")
    config = _clip_config(tmp_path / "m" / file)
    assert torch.allclose(_started(config), _embeddings(trained), rtol=0, atol=1e-5)
    assert not torch.allclose(_started(_clip_config(None)), _embeddings(trained), atol=1e-2)
    note = str(warm_start_note(config))
    assert "exported model of sweep one, trained on public shapes" in note
    assert "head" not in note


def test_changed_clip_model_is_not_started_from(tmp_path: Path) -> None:
    write_small_clip(tmp_path / "m")
    write_small_clip(tmp_path / "other", lora=None)
    shutil.copy(tmp_path / "other/open_clip_model.safetensors", tmp_path / "m/open_clip_model.safetensors")
    with pytest.raises(StorageError, match="is not the exported file"):
        read_warm_start(tmp_path / "m")


@pytest.mark.parametrize("file", ["", "open_clip_model.safetensors", "adapter/adapter_model.safetensors"])
def test_clip_model_of_private_pairs_is_refused(tmp_path: Path, file: str) -> None:
    write_small_clip(tmp_path / "m", data="private", lora=LORA)
    with pytest.raises(ConfigError, match="comes from private data"):
        read_warm_start(tmp_path / "m" / file)


@pytest.mark.parametrize("file", ["open_clip_model.safetensors", "adapter/adapter_model.safetensors"])
def test_files_of_private_pairs_are_refused_wherever_they_are_copied(tmp_path: Path, file: str) -> None:
    write_small_clip(tmp_path / "m", data="private", lora=LORA)
    shutil.copy(tmp_path / "m" / file, tmp_path / "blob")
    (tmp_path / "linked.safetensors").symlink_to(tmp_path / "blob")
    shutil.copy(tmp_path / "m" / file, tmp_path / "innocent.safetensors")
    for name in ("innocent.safetensors", "linked.safetensors"):
        with pytest.raises(ConfigError, match="comes from private data"):
            read_warm_start(tmp_path / name)


def test_private_clip_model_among_public_files_is_refused(tmp_path: Path) -> None:
    write_small_clip(tmp_path / "m", data="private")
    (tmp_path / "downloads").mkdir()
    for name in ("open_clip_model.safetensors", "open_clip_config.json"):
        shutil.copy(tmp_path / "m" / name, tmp_path / "downloads" / name)
    with pytest.raises(ConfigError, match="comes from private data"):
        read_warm_start(tmp_path / "downloads")


def test_training_starts_from_one_set_of_weights(tmp_path: Path) -> None:
    write_small_clip(tmp_path / "m")
    with pytest.raises(ConfigError, match="one set of weights"):
        starting_encoder(_clip_config(tmp_path / "m", pretrained="openai"), (3, 32, 32))


def test_place_is_no_name_of_published_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_clip(tmp_path / "openai", data="private")
    monkeypatch.chdir(tmp_path)
    for place in ("openai", str(tmp_path / "openai"), "openai/open_clip_model.safetensors", "none.pt"):
        with pytest.raises(ConfigError, match="Pass it as --warm-start"):
            starting_encoder(_clip_config(None, pretrained=place), (3, 32, 32))


def test_clip_model_that_differs_in_no_shape_is_refused(tmp_path: Path) -> None:
    write_small_clip(tmp_path / "m")
    config = json.loads((tmp_path / "m/open_clip_config.json").read_text())
    for part, change in (("model_cfg", {"quick_gelu": True}), ("preprocess_cfg", {"mean": [0.4] * 3})):
        other = config | {part: config[part] | change}
        (tmp_path / "other.json").write_text(json.dumps(other))
        with pytest.raises(ConfigError, match=f"Set --network {tmp_path / 'm'}"):
            starting_encoder(_clip_config(tmp_path / "m", name=str(tmp_path / "other.json")), (3, 32, 32))
    starting_encoder(_clip_config(tmp_path / "m", name=str(tmp_path / "m")), (3, 32, 32))


def test_clip_model_and_encoder_of_images_do_not_start_from_each_other(public: Path, tmp_path: Path) -> None:
    write_small_clip(tmp_path / "m")
    with pytest.raises(ConfigError, match="does not fit CLIP model clip-tiny"):
        starting_encoder(_clip_config(public), (3, 32, 32))
    with pytest.raises(ConfigError, match="of the same network"):
        starting_encoder(_config(tmp_path / "m"), SHAPE)


@pytest.mark.ci
def test_public_start_is_scored_beside_random_weights(public: Path) -> None:
    """Of both before training: what was learned is a difference to the first, not to the second."""
    data, asked = make_data(), EvaluationConfig(record_every_steps=0)
    config = _config(public, evaluation=asked)
    found = train(config, data).metrics
    starts = {"public_start_": config, "untrained_": dataclasses.replace(config, warm_start=None)}
    for prefix, start in starts.items():
        scores = all_scores(task_of(start), starting_encoder(start, SHAPE), data, start, device="cpu")
        assert scores
        assert {name: found[prefix + name] for name in scores} == scores
    fresh = train(starts["untrained_"], data).metrics
    assert not any(name.startswith("public_start_") for name in fresh)
    assert fresh["untrained_knn_accuracy"] == found["untrained_knn_accuracy"]


@pytest.mark.ci
def test_private_start_is_not_called_a_public_one(public: Path) -> None:
    config = _config(public, evaluation=EvaluationConfig(record_every_steps=0))
    assert config.warm_start is not None
    paid = PrivateStart(sweep="before", head=Head(ledger_id="one", num_entries=1, head_hash="0" * 64))
    private = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, private=paid))
    found = train(private, make_data()).metrics
    assert "private_start_knn_accuracy" in found
    assert not any(name.startswith("public_start_") for name in found)


def test_public_start_of_private_records_is_not_scored_on_them(public: Path) -> None:
    data = make_data(private=True, evaluation_is_public=False)
    found = train(_config(public, evaluation=EvaluationConfig(record_every_steps=0)), data).metrics
    assert not any(is_reference(name) for name in found)


def test_published_weights_are_a_public_start() -> None:
    published = ClipNetworkConfig(name="ViT-B-32", pretrained="laion2b_s34b_b79k")
    clip = {"text_views": TextViewConfig(), "num_augmentations": 0}
    assert not make_config(network=published, **clip).starts_at_random
    assert make_config(network=ClipNetworkConfig(), **clip).starts_at_random
