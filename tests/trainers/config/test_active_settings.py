"""Settings that nothing reads are left out of what a run shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.mechanism.registry import METHODS
from tests.trainers.databases import open_tracker
from trainers.config.active_settings import settings_with_effect
from trainers.config.optimizer_registry import OPTIMIZERS
from trainers.config.training import NetworkConfig, OptimizerConfig
from trainers.training.optimizers import build_optimizer


def steps_with(name, momentum):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(OptimizerConfig(name=name, momentum=momentum), [parameter])
    for _ in range(3):
        parameter.grad = torch.full((2, 2), 0.5)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_momentum_is_shown_of_optimizers_that_read_it(name):
    reads_it = not torch.equal(steps_with(name, 0.0), steps_with(name, 0.9))
    assert ("momentum" in settings_with_effect({"optimizer_name": name, "momentum": 0.9})) == reads_it


@pytest.mark.parametrize("name", ["dp_gcl", "byol_groups", "siglip_groups"])
def test_temperature_is_shown_of_losses_that_read_it(name):
    method = METHODS[name]
    generator = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(3, 4, 2, 8, generator=generator), dim=-1)
    one, other = (
        method.loss(LossSettings(temperature=temperature))(embeddings) for temperature in (0.2, 1.0)
    )
    reads_it = not torch.equal(one, other)
    assert ("temperature" in settings_with_effect({"method": name, "temperature": 0.5})) == reads_it


@pytest.mark.parametrize(
    ("params", "left_out"),
    [
        (
            {"blur_prob": 0.0, "min_blur_sigma": 0.1, "max_blur_sigma": 1.5},
            {"min_blur_sigma", "max_blur_sigma"},
        ),
        ({"blur_prob": 0.5, "min_blur_sigma": 0.1}, set()),
        ({"precision": "float32", "loss_scale": 1024.0}, {"loss_scale"}),
        ({"precision": "float16", "loss_scale": 1024.0}, set()),
        ({"image_shape": [1, 8, 8], "hue": 0.1, "saturation": 0.4}, {"hue", "saturation"}),
        ({"image_shape": [3, 8, 8], "hue": 0.1}, set()),
        ({"lora_rank": 0, "lora_alpha": 16, "lora_layers": "Q+V"}, {"lora_alpha", "lora_layers"}),
        ({"lora_rank": 8, "lora_alpha": 16}, set()),
        ({"lora_targets": (), "warm_start": None, "num_restart_steps": 0}, {"lora_targets", "warm_start"}),
    ],
)
def test_what_nothing_reads_is_left_out(params, left_out):
    assert set(params) - set(settings_with_effect(params)) == left_out


def test_networks_of_images_have_no_options_of_adapters():
    assert not [name for name in vars(NetworkConfig()) if name.startswith("lora")]


def test_runs_show_what_applies_alone(tmp_path):
    tracker = open_tracker(tmp_path)
    params = {"method": "dp_mae", "temperature": 0.5, "optimizer_name": "adamw", "momentum": 0.9, "repeat": 0}
    parent = tracker.start_sweep("one", params, {})
    run = tracker.log_trial(parent, "a", params, {}, {}, {})
    for run_id in (parent, run):
        assert set(tracker.client.get_run(run_id).data.params) == {"method", "optimizer_name", "repeat"}
