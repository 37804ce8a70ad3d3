"""A sweep as its driver leaves it: real trainings of two steps, without Ray and without MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn

from dpgcl_core.accounting.tuning.laws import TrialCountLaw
from dpgcl_core.release.statement import RESEARCH
from sweeps.group_size import points
from sweeps.service.cluster.interruption import StopRequest
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.running import driver
from sweeps.service.running import sweep as service
from sweeps.service.running.clock import SystemClock
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import options, run_sweep
from tests.trainers.clip_models import moved
from trainers.config.training import NetworkConfig
from trainers.export.description import CLIP, ClipDescription, ModelDescription
from trainers.export.export_folder import Statement, write_model
from trainers.models.clip.adapters import ClipLora
from trainers.models.clip.clip_encoder import ImageTextEncoder, build_image_text_encoder
from trainers.models.clip.published_models import ClipConfig
from trainers.models.encoder import Encoder, ImageShape, build_encoder
from trainers.models.task_networks import AnyEncoder
from trainers.training.loop import train

SMALL = ("--tiny", "--num-steps", "2", "--network", "tiny_cnn", "--embedding-dim", "8")
SMALL += (
    "--noise-multiplier",
    "4",
    "--no-also-untrained",
    "--max-query-records",
    "60",
    "--max-index-records",
    "60",
)
PAIRS = ("--dataset", "shapes:200", "--network", "clip-tiny", "--learning-rate", "0.02")
LORA = ClipLora(rank=2, alpha=4)


def run_small_sweep(root: Path, name: str, *more: str, num_sealed: int = 2) -> dict[str, AnyEncoder]:
    """Runs a group-size sweep in `root` and returns the trained encoders by trial.

    Args:
      root: the storage folder.
      name: of the sweep.
      more: options; later ones win.
      num_sealed: the number of trials that a sealed sweep draws.
    """
    trained: dict[str, AnyEncoder] = {}

    def run_trials(
        _: Any, plan: SweepPlan, folder: SweepFolder, trials: Sequence[Trial], on_result: Any, *__: Any
    ) -> dict[str, str]:
        for trial in trials:
            folder.mark_start(trial.name)
            place = folder.checkpoints(trial.name, every_steps=10)
            result = train(trial.config, plan.data, checkpoints=place)
            trained[trial.name] = result.encoder
            on_result(trial.name, {"metrics": result.metrics, "series": result.series})
        return {}

    assert _run(root, name, more, run_trials, num_sealed) == 0
    return trained


def stop_small_sweep(root: Path, name: str, *more: str) -> None:
    """The same, stopped by a signal once a training has been let draw."""

    def run_trials(_: Any, __: SweepPlan, folder: SweepFolder, trials: Sequence[Trial], *___: Any) -> None:
        folder.mark_start(trials[0].name)
        raise StopRequest(15)

    assert _run(root, name, more, run_trials) == 128 + 15


def _run(root: Path, name: str, more: Sequence[str], run_trials: Any, num_sealed: int = 2) -> int:
    chosen = options(*SMALL, "--storage", str(root), "--name", name, *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "ray_session", lambda *_: nullcontext())
        patch.setattr(driver, "run_trials", run_trials)
        patch.setattr(service, "Tracker", MagicMock())
        patch.setattr(TrialCountLaw, "draw", lambda _: num_sealed)
        patch.setattr(SystemClock, "sleep_until", lambda *_: None)
        return run_sweep("group-size", chosen, points(chosen), lambda *_: [])


def same_weights(found: Mapping[str, torch.Tensor], encoder: nn.Module) -> bool:
    """Whether a state dictionary is that of `encoder`, bit for bit."""
    own = encoder.state_dict()
    return found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)


def write_small_model(
    folder: Path,
    *,
    image_shape: ImageShape = (1, 8, 8),
    data: str = RESEARCH,
    embedding_dim: int = 8,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Encoder:
    """Writes an exported folder without a sweep and returns its encoder."""
    network = NetworkConfig(name="tiny_cnn", embedding_dim=embedding_dim)
    encoder = build_encoder(network, image_shape, seed=3)
    encoder.load_state_dict(dict(state or encoder.state_dict()))
    _write(
        folder,
        encoder,
        network=network.name,
        embedding_dim=embedding_dim,
        image_shape=image_shape,
        dataset="digits",
        data=data,
    )
    return encoder.eval()


def write_small_clip(
    folder: Path, *, data: str = RESEARCH, lora: ClipLora | None = LORA, config: ClipConfig | None = None
) -> ImageTextEncoder:
    """Writes an exported CLIP model without a sweep and returns what was trained."""
    encoder = moved(build_image_text_encoder(config or ClipConfig(), lora, seed=3))
    spec = encoder.spec
    about = ClipDescription(
        architecture=spec.architecture,
        mean=spec.mean,
        std=spec.std,
        context_length=spec.context_length,
        pretrained="random",
        lora_rank=lora.rank if lora else 0,
        lora_alpha=LORA.alpha,
        lora_targets=LORA.targets,
        lora_towers=LORA.towers,
    )
    _write(
        folder,
        encoder,
        kind=CLIP,
        clip=about,
        network=spec.name,
        embedding_dim=encoder.embedding_dim,
        image_shape=encoder.image_shape,
        pixel_mean=None,
        pixel_std=None,
        dataset="shapes",
        data=data,
    )
    return encoder.eval()


def _write(folder: Path, encoder: nn.Module, *, data: str, **about: Any) -> None:
    description = ModelDescription(
        promise="a promise",
        sweep="one",
        trial="a",
        choice="by name",
        method="dp_gcl",
        data=data,
        guarantee_label="proven",
        neighboring_relation="add or remove one record",
        epsilon=1.0,
        delta=1e-5,
        sweep_epsilon=2.0,
        sweep_delta=1e-5,
        num_steps=2,
        **about,
    )
    statement = Statement(values={"data": data}, page="# Privacy statement\n")
    write_model(folder, description, encoder.state_dict(), statement)


def write_pairs(path: Path, num_images: int, *, size: int = 32) -> str:
    """Writes random images with two captions each and returns the data set's name."""
    generator = np.random.default_rng(8)
    encoded = []
    for pixels in generator.integers(0, 256, (num_images, size, size, 3), dtype=np.uint8):
        buffer = BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        encoded.append(buffer.getvalue())
    captions = [[f"a thing of {number}", f"number {number}"] for number in range(num_images)]
    pq.write_table(pa.table({"image": encoded, "caption": captions}), path)
    return f"parquet:{path}"
