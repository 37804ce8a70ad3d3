"""Initial weights made from no data: a network pre-trained on generated records, without privacy.

`--warm-start synthetic:STEPS` takes STEPS steps on records that are generated on the fly and never seen
twice. On images of `trainers.data.procedural`, CNNs compare two views of each image (SimCLR, Chen et al.
2020), and masked auto-encoders rebuild hidden patches, as ViP does (Yu et al. 2023). On generated pairs of
`trainers.data.shapes`, with half of their words and with record numbers that no data set has, small CLIP
models compare images and captions, and captioners learn the captions. (DP-Cap pre-trains on textures, with
patches in place of tokens.) This costs no ε: the weights are a function of the network, the image shape, the
steps and a public seed. So they are the same for all neighbouring data sets, and a mechanism may start from
any such weights.

The weights are made once and kept in the cache folder of the data sets, in a file named by the hash of
everything that decides them. The file is read back like any warm start (`trainers.training.warm_start`). The
weights are made on one thread, so that the same machine makes the same bits again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError, StorageError, unknown_choice
from dpgcl_core.losses.image_text import image_text_group_loss
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.private_step import make_ahead
from dpgcl_core.release.statement import RESEARCH
from trainers.config.networks import (
    SYNTHETIC,
    CaptionerConfig,
    ClipNetworkConfig,
    EncoderConfig,
    MaskedNetworkConfig,
    NetworkConfig,
    TextViewConfig,
    ViewConfig,
)
from trainers.config.nodes import OptimizerConfig
from trainers.data import procedural, shapes
from trainers.data.download import cache_folder
from trainers.data.pairs import ImageTextRecords
from trainers.data.procedural import procedural_images
from trainers.files.weights import SAFETENSORS, read_note, read_weights, write_weights
from trainers.models import captioner, masked
from trainers.models.captioner import Captioner, build_captioner
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.models.clip.published_models import CLIP_NANO, SMALL_MODELS, ClipConfig, build_clip, find_clip
from trainers.models.encoder import NETWORKS as BACKBONES
from trainers.models.encoder import Encoder, ImageShape, build_encoder, to_fast_layout
from trainers.models.masked import MaskedAutoEncoder, build_masked
from trainers.tasks.caption_task import CAPTIONS
from trainers.tasks.masked_task import MASKED_IMAGES, patch_orders
from trainers.training.optimizers import build_optimizer, learning_rate_at
from trainers.views.caption_views import make_text_views
from trainers.views.image_views import make_views

VERSION = 1
"""Version of the pre-training: raised whenever the same recipe gives other weights."""

NETWORKS = (
    *(name for name, backbone in BACKBONES.items() if backbone.has_synthetic_start),
    *(*masked.SIZES, *captioner.SIZES, *SMALL_MODELS),
)
"""Networks that are pre-trained here; other networks have their own weights, or none."""

_CONTRASTIVE = OptimizerConfig(learning_rate=4e-3, warmup_steps=10, learning_rate_decay="cosine")
_TRANSFORMER = OptimizerConfig(
    name="adamw", learning_rate=2e-3, warmup_steps=10, learning_rate_decay="cosine"
)
_PAIR_VIEWS = ViewConfig(min_crop_area=0.8, flip_prob=0.0, brightness=0.0, contrast=0.0)

_TIMED_STEPS = range(2, 5)
_FOLDER = "starts"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, besides the versions of this module and of the records.

    Attributes:
      network: configuration of a network of `NETWORKS`; fields that affect no weight stay at their defaults.
      image_shape: (channels, height, width).
      num_steps: number of steps taken.
      seed: public seed of weights, images and views.
      batch_size: records per step; a contrastive loss compares each record with all others of its step.
      temperature: τ of the contrastive loss.
      optimizer: the optimizer's configuration.
      views: the augmentation.
    """

    network: EncoderConfig
    image_shape: ImageShape
    num_steps: int
    seed: int
    batch_size: int = 256
    temperature: float = 0.1
    optimizer: OptimizerConfig = _CONTRASTIVE
    views: ViewConfig = field(default_factory=lambda: ViewConfig(min_crop_area=0.2, saturation=0.4, hue=0.1))

    def __post_init__(self) -> None:
        if self.network.name not in NETWORKS:
            known = unknown_choice("network", self.network.name, NETWORKS)
            raise ConfigError(f"{SYNTHETIC}STEPS pre-trains only networks of this package: {known}")
        if self.num_steps <= self.optimizer.warmup_steps:
            raise ConfigError(
                f"{SYNTHETIC}STEPS needs more than the {self.optimizer.warmup_steps} steps in which its "
                f"learning rate rises; got {self.num_steps}. Use several hundred."
            )

    @property
    def key(self) -> str:
        """The hash of everything that decides the weights."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()

    @property
    def content(self) -> Mapping[str, Any]:
        """Everything that decides the weights, as JSON values."""
        records = shapes.VERSION if self.network.takes_pairs else procedural.VERSION
        values = asdict(self) | {"versions": [VERSION, records], "task": self.network.task}
        found: Mapping[str, Any] = json.loads(json.dumps(values))
        return found

    @property
    def made_of(self) -> str:
        """The records that the network is trained on, in words."""
        return "generated pairs" if self.network.takes_pairs else "procedural images"


def recipe_of(network: EncoderConfig, image_shape: ImageShape, *, num_steps: int, seed: int) -> Recipe:
    """Return the recipe that pre-trains a training's network; no other setting of the training affects it.

    Args:
      network: the network's configuration in the training.
      image_shape: (channels, height, width) of its records.
      num_steps: number of steps of the pre-training.
      seed: the public seed.

    Raises:
      ConfigError: the network is not pre-trained here, or needs more steps.
    """
    recipe_for = partial(Recipe, image_shape=image_shape, num_steps=num_steps, seed=seed)
    if isinstance(network, MaskedNetworkConfig):
        same = MaskedNetworkConfig(**_fields_of(network, "name", "patch_size", "mask_ratio"))
        views = ViewConfig(min_crop_area=0.2, brightness=0.0, contrast=0.0)
        return recipe_for(network=same, optimizer=_TRANSFORMER, views=views)
    if isinstance(network, CaptionerConfig):
        _check_size_of_pairs(image_shape)
        captions = CaptionerConfig(**_fields_of(network, "name", "patch_size", "tie_embeddings"))
        return recipe_for(network=captions, optimizer=_TRANSFORMER, views=_PAIR_VIEWS)
    if isinstance(network, NetworkConfig):
        return recipe_for(network=NetworkConfig(**_fields_of(network, "name", "embedding_dim")))
    if network.name not in SMALL_MODELS:
        raise ConfigError(
            f"{SYNTHETIC}{num_steps} pre-trains only the small CLIP models {', '.join(SMALL_MODELS)}; "
            f"got {network.name}. Start it from published or exported weights."
        )
    towers = ClipNetworkConfig(name=network.name)
    own_shape = (3, *find_clip(ClipConfig(model=network.name)).image_size)  # grey is repeated as colour
    return recipe_for(network=towers, image_shape=own_shape, optimizer=_TRANSFORMER, views=_PAIR_VIEWS)


def _check_size_of_pairs(image_shape: ImageShape) -> None:
    channels, height, width = image_shape
    smallest, largest = shapes.SHAPE_IMAGE_SIZES
    if channels != 3 or height != width or not smallest <= height <= largest:
        raise ConfigError(
            f"{SYNTHETIC}STEPS generates square colour images of {smallest} to {largest} pixels; got data of "
            f"{height} × {width} pixels in {channels} channels. Set --image-size, or start from a file of "
            "weights."
        )


def _fields_of(network: EncoderConfig, *names: str) -> dict[str, Any]:
    return {name: getattr(network, name) for name in names}


def public_start(recipe: Recipe) -> Path:
    """Return the file with the weights of a recipe; make it now if the cache does not have it.

    Processes that need the same weights at the same time make them only once. A file that is damaged, or that
    holds something else, is made again.

    Raises:
      ConfigError: the images are too small.
      StorageError: the cache cannot be written.
    """
    path = cache_folder() / _FOLDER / f"{recipe.network.name}-{recipe.key[:24]}{SAFETENSORS}"
    if _holds_weights_of(path, recipe):
        return path
    with _file_lock(path):
        if not _holds_weights_of(path, recipe):
            _write_start(path, pretrained(recipe), recipe)
    return path


def _holds_weights_of(path: Path, recipe: Recipe) -> bool:
    """Whether the file exists and holds the undamaged weights of the recipe."""
    try:
        tensors, note = read_weights(path).tensors, json.loads(read_note(path) or "{}")
    except (StorageError, ValueError):
        return False
    return bool(note.get("recipe") == recipe.content and note.get("digest") == _digest(tensors))


def _write_start(path: Path, encoder: nn.Module, recipe: Recipe) -> None:
    tensors = encoder.state_dict()
    note = {"data": RESEARCH, "recipe": recipe.content, "digest": _digest(tensors)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _cache_errors(path):
        write_weights(temporary, tensors, note=json.dumps(note))
        temporary.replace(path)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Lock the file against other processes, which wait; the system releases a dead process's lock."""
    lock = FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False)
    with _cache_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        held = lock.acquire()
    with held:
        yield


@contextlib.contextmanager
def _cache_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, NotImplementedError) as error:
        raise StorageError(
            f"the cache folder must be writable and support file locks; got {path.parent} ({error}). Set "
            "DPGCL_CACHE to another folder."
        ) from error


def pretrained(recipe: Recipe, device: str = "cpu") -> nn.Module:
    """Return a network trained by a recipe, and print a note on stderr with the expected time.

    For a CLIP model, the result is open_clip's model.

    Args:
      recipe: the network and all settings of its training.
      device: the device to train and to leave the network on. A GPU rounds differently: its weights belong
        to no recipe, and `public_start` does not keep them.

    Raises:
      ConfigError: the images are too small.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _pretrained(recipe, device)
    finally:
        torch.set_num_threads(threads)


def _pretrained(recipe: Recipe, device: str) -> nn.Module:
    network, make, loss = _untrained(recipe, torch.device(device))
    optimizer = build_optimizer(recipe.optimizer, network.parameters())
    times = []
    with ThreadPoolExecutor(1) as pool:
        for step, records in enumerate(make_ahead(make, range(recipe.num_steps), pool)):
            times.append(time.perf_counter())
            if step == _TIMED_STEPS.stop - 1:
                _print_note(recipe, (times[-1] - times[_TIMED_STEPS.start]) / (len(_TIMED_STEPS) - 1))
            optimizer.zero_grad()
            loss(step, records).backward()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(recipe.optimizer, step, recipe.num_steps)
            optimizer.step()
    return network


def _untrained(
    recipe: Recipe, device: torch.device
) -> tuple[nn.Module, Callable[[int], Any], Callable[[int, Any], Tensor]]:
    """Return the network at random weights, a function that makes a step's records, and the loss on them."""
    config, shape, seed = recipe.network, recipe.image_shape, recipe.seed
    if isinstance(config, CaptionerConfig):
        describer = build_captioner(config, shape, seed).to(device)
        return describer, partial(_pairs, recipe), partial(_caption_loss, recipe, describer)
    if isinstance(config, ClipNetworkConfig):
        spec = find_clip(ClipConfig(model=config.name))
        clip = build_clip(spec, seed)
        towers = ImageTextEncoder(clip, spec).to(device)
        return clip, partial(_pairs, recipe), partial(_towers_loss, recipe, towers)
    if isinstance(config, MaskedNetworkConfig):
        auto_encoder = build_masked(config, shape, seed).to(device)
        return auto_encoder, partial(_images, recipe), partial(_masked_loss, recipe, auto_encoder)
    encoder = build_encoder(config, shape, seed)
    to_fast_layout(encoder, device, shape)
    return encoder, partial(_images, recipe), partial(_contrastive_loss, recipe, encoder)


def _contrastive_loss(recipe: Recipe, encoder: Encoder, step: int, images: NDArray[np.uint8]) -> Tensor:
    """Return the mean contrastive loss in both directions."""
    embeddings = encoder.embed_views(_views(recipe, step, images, num_views=2)[None].to(_device_of(encoder)))
    both = torch.cat([embeddings, embeddings.flip(2)])
    return two_view_group_loss(both, temperature=recipe.temperature).sum() / (2 * recipe.batch_size)


def _masked_loss(recipe: Recipe, network: MaskedAutoEncoder, step: int, images: NDArray[np.uint8]) -> Tensor:
    """Return the mean error of the hidden patches."""
    ids = _ids(recipe, step)
    orders = patch_orders(ids, network.num_patches, seed=recipe.seed, step=step)
    inputs = _views(recipe, step, images, num_views=1)[:, None], orders[:, None, None]
    return MASKED_IMAGES.losses(network)(tuple(each.to(_device_of(network)) for each in inputs)).mean()


def _caption_loss(recipe: Recipe, network: Captioner, step: int, pairs: ImageTextRecords) -> Tensor:
    """Return the mean error of the next tokens."""
    images, texts = _views_of_pairs(recipe, step, pairs)
    inputs = images[:, None, None], network.tokenizer(texts).tokens[:, None, None]
    return CAPTIONS.losses(network)(tuple(each.to(_device_of(network)) for each in inputs)).mean()


def _towers_loss(recipe: Recipe, network: ImageTextEncoder, step: int, pairs: ImageTextRecords) -> Tensor:
    """Return the mean contrastive loss from images to texts and back."""
    images, texts = _views_of_pairs(recipe, step, pairs)
    tokens, device = network.tokenizer(texts).tokens, _device_of(network)
    both = network.embed_images(images.to(device)), network.embed_texts(tokens.to(device))
    embeddings = torch.stack(both, dim=1)[None]
    return image_text_group_loss(embeddings, temperature=recipe.temperature).sum() / (2 * recipe.batch_size)


def _device_of(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _views_of_pairs(recipe: Recipe, step: int, pairs: ImageTextRecords) -> tuple[Tensor, list[str]]:
    """Return one view of each pair: images `[n, C, H, W]` and texts `[n]`."""
    view_keys = {"seed": recipe.seed, "step": step, "num_views": 1}
    captions = [caption for caption, *_ in pairs.captions]
    images = torch.from_numpy(np.asarray(pairs.images))
    views = make_views(images, pairs.ids, config=recipe.views, **view_keys)
    texts = make_text_views(captions, pairs.ids, config=TextViewConfig(), **view_keys)
    return views[:, 0], [text for (text,) in texts]


def _views(recipe: Recipe, step: int, images: NDArray[np.uint8], *, num_views: int) -> Tensor:
    return make_views(
        torch.from_numpy(images),
        _ids(recipe, step),
        config=recipe.views,
        seed=recipe.seed,
        step=step,
        num_views=num_views,
    )


def _ids(recipe: Recipe, step: int) -> NDArray[np.uint64]:
    return np.arange(step * recipe.batch_size, (step + 1) * recipe.batch_size, dtype=np.uint64)


def _images(recipe: Recipe, step: int) -> NDArray[np.uint8]:
    return procedural_images(_ids(recipe, step), recipe.image_shape, seed=recipe.seed)


def _pairs(recipe: Recipe, step: int) -> ImageTextRecords:
    return shapes.make_shape_pairs(
        recipe.batch_size,
        seed=recipe.seed,
        image_size=recipe.image_shape[1],
        first=shapes.FIRST_UNUSED_SHAPE + step * recipe.batch_size,
        vocabulary="common",
        is_short=recipe.network.name == CLIP_NANO,  # whose small context would cut longer captions
    )


def _print_note(recipe: Recipe, seconds_per_step: float) -> None:
    seconds = recipe.num_steps * seconds_per_step
    print(
        f"note: pre-training {recipe.network.name} for {recipe.num_steps} steps on {recipe.made_of}, only "
        f"once, in about {max(1, round(seconds))} s. The weights are kept in {cache_folder() / _FOLDER}",
        file=sys.stderr,
        flush=True,
    )
