"""The microbatch that is chosen: from shapes and free memory alone, and never too small for one group."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from dpgcl_core.clipping.types import trainable_parameters
from tests.trainers.conftest import make_config, make_data
from trainers.config.training import EvaluationConfig, NetworkConfig, PerformanceConfig, TrainingConfig
from trainers.files import machine_memory
from trainers.models.encoder import Encoder, build_encoder
from trainers.tasks import IMAGES
from trainers.training import microbatch
from trainers.training.loop import train
from trainers.training.microbatch import activation_bytes, free_memory, max_views

CPU = torch.device("cpu")


def automatic(**changes: object) -> TrainingConfig:
    return make_config(performance=PerformanceConfig(device="cpu"), **changes)


def encoder_of(config: TrainingConfig, shape: tuple[int, int, int] = (1, 8, 8)) -> Encoder:
    return build_encoder(config.network, shape, 0)


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(microbatch, "free_memory", lambda device: num_bytes)


def test_microbatch_that_is_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    config = make_config(performance=PerformanceConfig(max_views_per_microbatch=77, device="cpu"))
    assert max_views(config, encoder_of(config), (1, 8, 8)) == 77


def test_microbatch_follows_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = automatic()
    encoder, found = encoder_of(config), []
    for num_bytes in (2**20, 2**21, 2**22):
        free(monkeypatch, num_bytes)
        found.append(max_views(config, encoder, (1, 8, 8)))
    assert found[1] == pytest.approx(2 * found[0], abs=2)
    assert found[2] == pytest.approx(4 * found[0], abs=4)


def test_microbatch_follows_the_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**22)
    config = automatic()
    whole, quarter = (
        max_views(config, encoder_of(config), (1, 8, 8), memory_share=share) for share in (1.0, 0.25)
    )
    assert quarter == pytest.approx(whole / 4, abs=1)


def test_microbatch_fits_into_the_memory_by_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**24)
    config = automatic()
    encoder = encoder_of(config)
    assert max_views(config, encoder, (1, 8, 8)) * activation_bytes(IMAGES, encoder, (1, 8, 8)) < 2**24 / 4


def test_microbatch_of_large_activations_is_smaller_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**40)
    small = automatic()
    large = automatic(network=NetworkConfig(name="resnet18"))
    shape = (3, 32, 32)
    assert max_views(small, encoder_of(small, shape), shape) == 768
    assert 16 <= max_views(large, encoder_of(large, shape), shape) <= 64


def test_one_group_goes_through_however_little_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    config = automatic()
    assert max_views(config, encoder_of(config), (1, 8, 8)) == 1
    assert train(config, make_data()).metrics["num_steps_done"] == 6


@pytest.mark.ci
def test_microbatch_that_is_chosen_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for num_bytes in (0, 2**21, 2**40):
        free(monkeypatch, num_bytes)
        # SGD: Adam's first steps are signs, which turn at the smallest rounding of a tiny gradient.
        optimizer = dataclasses.replace(automatic().optimizer, name="sgd")
        nothing = EvaluationConfig(record_every_steps=0, also_untrained=False)
        config = automatic(seeded_non_private=True, optimizer=optimizer, evaluation=nothing)
        encoder = train(config, make_data()).encoder
        results.append(torch.cat([p.detach().flatten() for p in trainable_parameters(encoder)]))
    for other in results[1:]:
        assert float((other - results[0]).norm() / results[0].norm()) < 1e-6


def test_activations_count_every_innermost_output() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 3))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.layers(images)
            return output

        embed_views = Encoder.embed_views

    assert activation_bytes(IMAGES, Two(), (1, 8, 8)) == 4 * (64 + 64 + 10 + 3)  # type: ignore[arg-type]


def test_free_memory_is_at_most_what_the_control_group_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "max").write_text("1000\n")
    (tmp_path / "current").write_text("400\n")
    monkeypatch.setattr(machine_memory, "_CGROUP_FILES", ((tmp_path / "max", tmp_path / "current"),))
    assert free_memory(CPU) == 600


def test_free_memory_without_a_limit_is_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "current").write_text("400\n")
    files = ((tmp_path / "max", tmp_path / "current"), (tmp_path / "gone", tmp_path / "gone"))
    monkeypatch.setattr(machine_memory, "_CGROUP_FILES", files)
    monkeypatch.setattr(machine_memory, "_available_on_machine", lambda: 12345)
    assert free_memory(CPU) == 12345


def test_free_memory_is_never_negative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "max").write_text("400")
    (tmp_path / "current").write_text("1000")
    monkeypatch.setattr(machine_memory, "_CGROUP_FILES", ((tmp_path / "max", tmp_path / "current"),))
    assert free_memory(CPU) == 0
