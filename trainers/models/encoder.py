"""Stage 5, encoder: views become unit embeddings, each from its own view alone.

The sensitivity of a group's gradient holds only if the embedding of one record does not depend on the
records beside it. `refuse_cross_record` checks that before a training starts; a network of the user's
own is welcome as long as it passes.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpgcl_core.errors import ConfigError, unknown_choice
from trainers.config.training import NetworkConfig
from trainers.models.resnet import resnet18
from trainers.models.small_cnn import small_cnn, tiny_cnn
from trainers.models.vit_lora import vit_b_32_lora

ImageShape = tuple[int, int, int]
"""(channels, height, width)."""

NETWORKS: dict[str, Callable[[ImageShape], nn.Module]] = {
    "resnet18": resnet18,
    "small_cnn": small_cnn,
    "tiny_cnn": tiny_cnn,
    "vit_b_32_lora": vit_b_32_lora,
}
"""Built-in backbones: a factory takes the image shape and returns a module from images to features."""

NORM_FLOOR = 1e-6
"""Embeddings shorter than this are divided by it, so the zero vector stays zero and finite."""

_NUM_PROBE_RECORDS = 4
_CROSS_RECORD_REASON = (
    "what one record contributes must depend on no other record, or one record changes every group and "
    "the per-group sensitivity is false"
)


class Encoder(nn.Module):
    """A backbone with a projection head (Chen et al. 2020): Linear, ReLU, Linear, unit length.

    Args:
      backbone: images `[n, C, H, W]` to features `[n, feature_dim]`.
      feature_dim: width of the features, which are what is evaluated.
      embedding_dim: width of the embeddings, which are what the loss sees.
      predictor: put a predictor behind the head (BYOL, Grill et al. 2020); its LayerNorm takes the statistics
        of one embedding, where the original's BatchNorm would mix records.
    """

    def __init__(
        self, backbone: nn.Module, feature_dim: int, embedding_dim: int, *, predictor: bool = False
    ) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.embedding_dim = embedding_dim
        self.backbone = backbone
        self.head = nn.Sequential(
            nn.Linear(feature_dim, embedding_dim),
            nn.ReLU(inplace=False),
            nn.Linear(embedding_dim, embedding_dim),
        )
        self.predictor = _predictor(embedding_dim) if predictor else None

    def features(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of normalised images `[n, C, H, W]`."""
        features: Tensor = self.backbone(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings `[n, embedding_dim]` of length 1 (0 for a vector of zeros), or predictions."""
        projected = self.head(self.features(images))
        if self.predictor is not None:
            projected = self.predictor(projected)
        return F.normalize(projected, dim=1, eps=NORM_FLOOR)

    def embed_views(self, views: Tensor) -> Tensor:
        """Return embeddings `[groups, group_size, views, dim]` of views `[..., C, H, W]`."""
        embeddings: Tensor = self(views.flatten(0, 2))
        grouped: Tensor = embeddings.unflatten(0, views.shape[:3])
        return grouped

    def without_predictor(self, images: Tensor) -> Tensor:
        """Return embeddings `[n, embedding_dim]`, as a target network gives them."""
        return F.normalize(self.head(self.features(images)), dim=1, eps=NORM_FLOOR)


def _predictor(dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.ReLU(inplace=False), nn.Linear(2 * dim, dim)
    )


def build_encoder(config: NetworkConfig, image_shape: ImageShape, seed: int) -> Encoder:
    """Return a freshly initialised encoder on the CPU.

    The initial weights are a function of the network and the public seed alone: the global random state
    is neither read nor changed.

    Args:
      config: which network.
      image_shape: (channels, height, width).
      seed: public seed.

    Raises:
      ConfigError: unknown network, a factory that cannot be imported or fails, or a network whose
        output is not `[n, feature_dim]`.

    >>> encoder = build_encoder(NetworkConfig(), (1, 28, 28), seed=0)
    >>> encoder(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 64])
    """
    factory = _factory(config.name)
    # Seeding through torch.manual_seed would also reseed CUDA, which fork_rng(devices=[]) leaves alone.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            backbone = factory(image_shape)
        except Exception as error:
            raise ConfigError(
                f"network {config.name!r} cannot be built for images of shape {image_shape} "
                f"(channels, height, width): {type(error).__name__}: {error}"
            ) from error
        feature_dim = _feature_dim(backbone, config.name, image_shape)
        return Encoder(backbone, feature_dim, config.embedding_dim, predictor=config.predictor)


def device_named(name: str) -> torch.device:
    """Return a device by name; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def to_fast_layout(encoder: Encoder, device: torch.device, image_shape: tuple[int, ...]) -> None:
    """Move the network to the device, channels last where it runs so.

    On CPUs convolutions are faster by a quarter, and the clipping engine reads patches so. A network that
    calls `view` on a convolution's output or weight runs in the ordinary layout only.
    """
    network: Any = encoder  # the declared overloads of `to` lack memory_format
    network.to(device, memory_format=torch.channels_last)
    try:
        encoder(torch.zeros(2, *image_shape, device=device))
    except RuntimeError:
        network.to(memory_format=torch.contiguous_format)


def _factory(name: str) -> Callable[[ImageShape], nn.Module]:
    """The backbone factory of a registered name or of `package.module:factory`."""
    if name in NETWORKS:
        return NETWORKS[name]
    module_name, colon, factory_name = name.partition(":")
    if not colon:
        raise ConfigError(unknown_choice("network", name, [*NETWORKS, "package.module:factory"]))
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except Exception as error:  # a user's module may fail in any way while it is imported
        raise ConfigError(
            f"network {name!r} must name an importable `package.module:factory`; "
            f"{type(error).__name__}: {error}. Put the package on PYTHONPATH or install it"
        ) from error
    if not callable(factory):
        raise ConfigError(f"network {name!r} must name a callable; got {type(factory).__name__}")
    built: Callable[[ImageShape], nn.Module] = factory
    return built


def _feature_dim(backbone: nn.Module, name: str, image_shape: ImageShape) -> int:
    """Width of the backbone's output, from a trial pass over blank images."""
    if not isinstance(backbone, nn.Module):
        raise ConfigError(
            f"the factory of network {name!r} must return a torch.nn.Module; got {type(backbone).__name__}"
        )
    was_training = backbone.training
    backbone.eval()
    try:
        with torch.no_grad():
            features = backbone(torch.zeros(2, *image_shape))
    except Exception as error:
        raise ConfigError(
            f"network {name!r} cannot read images of shape {image_shape} (channels, height, width): "
            f"{type(error).__name__}: {error}"
        ) from error
    backbone.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(
            f"network {name!r} must return features [n, feature_dim]; got {got} for n = 2. "
            "Pool and flatten inside the network"
        )
    return features.shape[1]


def refuse_written_buffers(encoder: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Refuse a network whose buffers are no longer what they were before the training.

    A buffer that follows the data would be released without noise; `refuse_cross_record` saw random images.

    Raises:
      ConfigError: names the buffer.
    """
    for name, buffer in encoder.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ConfigError(f"the network wrote its buffer {name!r} during training; keep no such state")


def refuse_cross_record(encoder: nn.Module, image_shape: ImageShape) -> None:
    """Refuse an encoder in which records see each other, or which is random within a step.

    Three checks. The norm layers that are known to use statistics across records are refused by type.
    Random images are passed in training mode, one of them is changed or the batch is cut short, and no
    output of any module may move for the other records; once more with perturbed weights, lest a zero
    initialisation hide a branch. No pass may write to a parameter or a buffer, for what it wrote would
    be released without noise. These are tests, not proofs: a module that mixes records for special
    inputs only, or keeps them in a plain Python attribute, passes. The encoder itself is left untouched.

    Args:
      encoder: normalised images `[n, C, H, W]` to embeddings `[n, embedding_dim]`.
      image_shape: (channels, height, width).

    Raises:
      ConfigError: names the module and the reason.

    >>> refuse_cross_record(build_encoder(NetworkConfig(), (1, 8, 8), seed=0), (1, 8, 8))
    """
    for name, module in encoder.named_modules():
        if isinstance(module, _BatchNorm) or (
            isinstance(module, _InstanceNorm) and module.track_running_stats
        ):
            raise ConfigError(
                f"module {name!r} is a {type(module).__name__}, which uses statistics across records; "
                f"{_CROSS_RECORD_REASON}. Use nn.GroupNorm in its place"
            )
    # A copy, because a pass in training mode may change buffers.
    probe = copy.deepcopy(encoder).train()
    device = next((p.device for p in probe.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    images, others = (
        (torch.rand(_NUM_PROBE_RECORDS, *image_shape, generator=generator) * 2 - 1).to(device)
        for _ in range(2)
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        _refuse_written_state(probe, images)
        _refuse_moved_rows(probe, images, others)
        for parameter in probe.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
        _refuse_moved_rows(probe, images, others)


def _refuse_written_state(probe: nn.Module, images: Tensor) -> None:
    """Refuse a pass that changes the state dictionary: running statistics, data-dependent initial values."""
    before = {name: value.clone() for name, value in probe.state_dict().items()}
    probe(images)
    for name, value in probe.state_dict().items():
        if name not in before or not torch.equal(value, before[name]):
            raise ConfigError(
                f"the network writes {name!r} while it embeds images; such state would carry un-noised data "
                "into the released model. Keep nothing between passes"
            )


def _refuse_moved_rows(probe: nn.Module, images: Tensor, others: Tensor) -> None:
    """Compare passes over the same images, over images with one replaced, and over fewer images."""
    n = len(images)
    expected = _trace(probe, images)
    culprit = _first_moved(expected, _trace(probe, images), list(range(n)))
    if culprit is not None:
        raise ConfigError(
            f"module {culprit} gives two different outputs for the same images; the steps of a training "
            "must draw their randomness from the mechanism and the views alone. Remove dropout and the like"
        )
    for changed in range(n):
        rows = [row for row in range(n) if row != changed]
        replaced = images.clone()
        replaced[changed] = others[changed]
        culprit = _first_moved(expected, _trace(probe, replaced), rows)
        if culprit is not None:
            raise ConfigError(
                f"module {culprit} mixes records: its output for one record moved when another record "
                f"changed; {_CROSS_RECORD_REASON}. Compute every statistic within one record"
            )
    # Another batch size may choose another convolution algorithm, so more rounding is allowed.
    culprit = _first_moved(expected, _trace(probe, images[:-1]), list(range(n - 1)), tolerance=1e-5)
    if culprit is not None:
        raise ConfigError(
            f"module {culprit} depends on the number of records in the batch; {_CROSS_RECORD_REASON}. "
            "Compute every output from one record"
        )


_Call = tuple[str, Tensor | None, Tensor | None]


def _trace(probe: nn.Module, images: Tensor) -> list[_Call]:
    """(module name, first input, output) of every module call in order of completion."""
    calls: list[_Call] = []

    def recorder(name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def record(_: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            # Clones, because a later in-place module may write over what it was given.
            kept = [
                value.clone() if isinstance(value, Tensor) and value.shape[:1] == images.shape[:1] else None
                for value in (inputs[0] if inputs else None, output)
            ]
            calls.append((name, kept[0], kept[1]))

        return record

    handles = [
        module.register_forward_hook(recorder(f"{name!r} ({type(module).__name__})" if name else "encoder"))
        for name, module in probe.named_modules()
    ]
    try:
        probe(images)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _first_moved(
    expected: list[_Call], actual: list[_Call], rows: list[int], tolerance: float = 1e-6
) -> str | None:
    """The first module whose output moved at `rows` although its input there did not."""
    if len(expected) != len(actual):  # other modules ran; the encoder's own call still comes last
        expected, actual = expected[-1:], actual[-1:]
    for (name, input_before, output_before), (_, input_after, output_after) in zip(
        expected, actual, strict=True
    ):
        output_moved = _moved(output_before, output_after, rows, tolerance)
        if output_moved and not _moved(input_before, input_after, rows, tolerance):
            return name
    return None


def _moved(before: Tensor | None, after: Tensor | None, rows: list[int], tolerance: float) -> bool:
    if before is None or after is None or before.numel() == 0:
        return False
    if before.shape[1:] != after.shape[1:]:
        return True
    scale = 1 + float(before.abs().nan_to_num().max())
    return not torch.allclose(before[rows], after[rows], rtol=0.0, atol=tolerance * scale, equal_nan=True)
