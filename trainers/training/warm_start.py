"""Starting from weights instead of a random draw, and why they must be public.

The guarantee of a training is about its own records: whatever the first weights are, as long as they are
fixed beforehand and do not depend on those records, the steps from there on are the same mechanism, and ε
is the same. It says nothing of the data that the first weights were made from. So:

- Weights made from **private** records are refused. A model with an ε of its own would carry it into this
  one; if they were made from the same records, both ε would add up, and nothing here adds them.
- A model that was exported from public or synthetic data is accepted.
- A file that does not say what it was made from is taken to be public on the user's word, and the privacy
  statement says so.

A file that `trainers.export.trial` wrote says whose data it comes from even when it is copied elsewhere, and
so does a privacy statement that lies beside it.

What identifies a warm start is the hash of its file: it enters a trial's configuration, and every worker
checks it as it loads. The path must be one that all machines see.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.release.statement import RESEARCH
from trainers.config.training import ClipNetworkConfig, TrainingConfig, WarmStart
from trainers.export.folder import DESCRIPTION, STATEMENT, WEIGHTS, read_description, read_model_weights
from trainers.files.weights import misfits, read_note, read_weights
from trainers.models.clip.adapters import ClipLora
from trainers.models.clip.encoder import ImageTextEncoder, build_image_text_encoder
from trainers.models.clip.published import CONFIG_FILE, RANDOM, WEIGHTS_FILE, ClipConfig, ClipSpec, find_clip
from trainers.models.encoder import Encoder, ImageShape, build_encoder
from trainers.tasks.modality import AnyEncoder

_BACKBONE, _HEAD, _PREDICTOR = "backbone.", "head.", "predictor."
_LAST_OF_HEAD = "head.2.weight"


def read_warm_start(path: Path) -> WarmStart:
    """Returns what a training can start from, with the hash of its weights.

    Args:
      path: a folder that `python -m trainers.export` wrote, or a file with a state dictionary of the same
        network (or of its backbone alone): `.safetensors`, or written by `torch.save`.

    Raises:
      ConfigError: there is nothing, or the weights come from private data.
      StorageError: the folder or the file is damaged.
    """
    path = path.expanduser().absolute()
    if path.is_dir():
        path = next(
            (path / name for name in (WEIGHTS, WEIGHTS_FILE) if (path / name).exists()), path / WEIGHTS
        )
    elif not path.is_file():
        raise ConfigError(
            f"warm_start must be an exported model's folder or a file of weights; there is no {path}"
        )
    _refuse_private(path)
    if path.name in (WEIGHTS, WEIGHTS_FILE) and (path.parent / DESCRIPTION).exists():
        description = read_description(path.parent)
        if path.name != description.weights_file:
            raise StorageError(
                f"the model in {path.parent} is in {description.weights_file}, not {path.name}"
            )
        read_model_weights(path.parent, description)
        origin = f"the exported model of sweep {description.sweep}, trained on public {description.dataset}"
    elif path.name == WEIGHTS and not path.exists():
        raise StorageError(
            f"{path.parent} holds no {WEIGHTS} and no {WEIGHTS_FILE}: give an exported model's folder, or a "
            "file"
        )
    else:
        origin = "weights that are taken to be public on the word of whoever gave them"
    weights = read_weights(path)
    last = _encoder_names(weights.tensors).get(_LAST_OF_HEAD)
    return WarmStart(
        path=str(path),
        sha256=weights.sha256,
        embedding_dim=None if last is None or not last.ndim else len(last),
        origin=origin,
    )


def _refuse_private(path: Path) -> None:
    """Refuses weights that say, themselves or by what lies beside them, that private data made them."""
    place = path.resolve().parent
    beside = (place / DESCRIPTION, place / f"{STATEMENT}.json")
    said = [_data_of(file.read_text(encoding="utf-8")) for file in beside if file.is_file()]
    note = read_note(path)  # under the name that it is read by: what a link leads to may have no suffix
    said += [] if note is None else [_data_of(note)]
    if any(data != RESEARCH for data in said):
        raise ConfigError(
            f"a training must start from public or synthetic weights; {path} comes from private data, and "
            "its ε would have to be added to this training's. Train from scratch, or give public weights"
        )


def _data_of(text: str) -> str:
    """What a description or a statement says of its data; what says nothing of them is not public."""
    try:
        values = json.loads(text)
    except ValueError:
        return ""
    return str(values.get("data")) if isinstance(values, dict) else ""


def starting_encoder(config: TrainingConfig, image_shape: ImageShape) -> AnyEncoder:
    """Returns the encoder before step 0, on the CPU: a random draw from the public seed, or the warm start.

    Of a warm start the whole backbone is taken; its projection head is, too, if it has one and of this
    training's `embedding_dim`. A head of another width, like a missing one, leaves the fresh head. The
    predictor of a method that has one is a part of its loss, and always starts fresh. Of a CLIP model all
    weights are taken, and adapters start fresh.

    Args:
      config: of the training.
      image_shape: (channels, height, width).

    Raises:
      ConfigError: the weights do not fit, are not finite, or have changed since the training was planned;
        or as `build_encoder`.
      StorageError: the file cannot be read here.
    """
    if isinstance(config.network, ClipNetworkConfig):
        return _starting_clip(config, config.network)
    encoder = build_encoder(config.network, image_shape, config.public_seed)
    if config.warm_start is not None:
        _load(encoder, config.warm_start)
    return encoder


def _starting_clip(config: TrainingConfig, network: ClipNetworkConfig) -> ImageTextEncoder:
    start, weights = config.warm_start, network.pretrained
    if start is None:
        _refuse_place(weights)
    else:
        _check_same_model(network, start)
        for name, value in _planned(start).items():
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise ConfigError(f"a warm start must be finite, and {name} in {start.path} is not")
        weights = start.path
    lora = ClipLora(
        rank=network.lora_rank,
        alpha=network.lora_alpha,
        targets=network.lora_targets,
        towers=network.lora_towers,
    )
    return build_image_text_encoder(
        ClipConfig(model=network.name, weights=weights),
        lora if network.lora_rank else None,
        seed=config.public_seed,
        train_logit_scale=network.learn_temperature,
        temperature=config.temperature if network.learn_temperature else None,
        gradient_checkpointing=network.gradient_checkpointing,
    )


def _refuse_place(pretrained: str) -> None:
    """Refuses a file in place of a name: only of a warm start it is asked whose data made it."""
    if Path(pretrained).expanduser().exists() or Path(pretrained).suffix or os.sep in pretrained:
        raise ConfigError(
            f"pretrained must be {RANDOM} or open_clip's name of published weights; got {pretrained}, a "
            "place: give it as --warm-start"
        )


def _check_same_model(network: ClipNetworkConfig, start: WarmStart) -> None:
    """Refuses a second beginning, and weights of a model that is another though its tensors may fit.

    Number of heads, activation and colours show in no tensor's shape.
    """
    if network.pretrained != RANDOM:
        raise ConfigError(
            f"a training must start from one set of weights; got the warm start {start.path} and pretrained "
            f"= {network.pretrained}: leave one out, with --pretrained {RANDOM}"
        )
    place = Path(start.path).parent
    if not (place / CONFIG_FILE).is_file():
        return
    made_for, asked = (find_clip(ClipConfig(model=each)) for each in (f"{place / CONFIG_FILE}", network.name))
    if _what_it_is(made_for) != _what_it_is(asked):
        raise ConfigError(
            f"the warm start must be of the same CLIP model, and {place / CONFIG_FILE} says another than "
            f"{network.name}: give --network {place}"
        )


def _what_it_is(spec: ClipSpec) -> str:
    return json.dumps([spec.architecture, spec.mean, spec.std], sort_keys=True)


def _planned(start: WarmStart) -> Mapping[str, Tensor]:
    """The tensors of the file that a training was planned with."""
    weights = read_weights(Path(start.path))
    if weights.sha256 != start.sha256:
        raise ConfigError(
            f"the warm start {start.path} must be the file that the training was planned with, sha256 "
            f"{start.sha256}; got {weights.sha256}: put it back, and where all machines see it"
        )
    return weights.tensors


def _load(encoder: Encoder, start: WarmStart) -> None:
    own, given = encoder.state_dict(), _encoder_names(_planned(start))
    fresh = (_PREDICTOR,) if start.embedding_dim == encoder.embedding_dim else (_PREDICTOR, _HEAD)
    given = {name: value for name, value in given.items() if not name.startswith(fresh)}
    given |= {name: value for name, value in own.items() if name.startswith(fresh)}
    difference = misfits(given, own)
    if difference is not None:
        raise ConfigError(
            f"the warm start must be of the same network, and {start.path} is not: {difference}; give the "
            "--network and image size that it was made with"
        )
    for name, value in given.items():
        if not torch.isfinite(value).all():
            raise ConfigError(f"a warm start must be finite, and {name} in {start.path} is not; give another")
    encoder.load_state_dict(given)


def _encoder_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in an `Encoder`; a backbone's own state dictionary has no prefix."""
    if any(name.startswith(_BACKBONE) for name in tensors):
        return dict(tensors)
    return {_BACKBONE + name: value for name, value in tensors.items()}


def warm_start_note(config: TrainingConfig) -> str | None:
    """Returns what the privacy statement must say of a warm start; None without one."""
    start, network = config.warm_start, config.network
    if start is None:
        return _published_note(network) if isinstance(network, ClipNetworkConfig) else None
    whole = isinstance(network, ClipNetworkConfig) or start.embedding_dim == network.embedding_dim
    head = "" if whole else "; the projection head starts fresh"
    return (
        f"Warm start: from {start.origin} (sha256 {start.sha256}){head}. The guarantee is about this sweep's "
        "training data and says nothing of the data that made those weights."
    )


def _published_note(network: ClipNetworkConfig) -> str | None:
    if network.pretrained == RANDOM:
        return None
    return (
        f"Starts from the published weights {network.pretrained} of {network.name}. The guarantee is about "
        "this sweep's training data and says nothing of the data that made those weights."
    )
