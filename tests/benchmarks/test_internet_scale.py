"""The numbers of a training at internet scale: what the code itself does at small scale is what they say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.internet_scale import Options, numbers
from dpgcl_core.accounting.composition import epsilon_pld, poisson_gaussian_event
from dpgcl_core.clipping.types import no_sum
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger, StepClass
from dpgcl_core.sampling.slots import SampledGroups
from tests.trainers.conftest import make_config, make_data
from trainers.files.checkpoint import CheckpointFolder
from trainers.training.loop import train

pytestmark = pytest.mark.ci


class Counting:
    """A generator that counts what is drawn from it."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()
        self.num_bits = self.num_integers = 0

    def random(self, size: int) -> Any:
        self.num_bits += size
        return self.generator.random(size)

    def integers(self, low: int, high: int, size: int) -> Any:
        self.num_integers += size
        return self.generator.integers(low, high, size)

    def permutation(self, x: Any) -> Any:
        raise AssertionError("few of many are drawn one by one")


@pytest.mark.parametrize("num_records", [200_000, 2_000_000])
def test_only_the_bits_of_a_draw_grow_with_the_number_of_records(num_records: int) -> None:
    batch, size = 1_600, 16
    sampling, permutation = Counting(), Counting()
    stage = SampledGroups(capacity=num_records, group_size=size, sampling_prob=batch / num_records)
    drawn = stage.draw(num_records, sampling=sampling, permutation=permutation)  # type: ignore[arg-type]
    options = Options(num_records=num_records, expected_batch_size=batch, group_size=size, num_steps=10)
    assert sampling.num_bits == numbers(options)["blocks_drawn_per_step"] == num_records // size
    assert drawn.rows.nbytes <= 2 * numbers(options)["drawn_rows_bytes"]
    assert permutation.num_integers < 8 * batch, "whatever the number of records"


def test_noise_of_the_numbers_keeps_the_target() -> None:
    options = Options(num_records=60_000, expected_batch_size=1_024, num_steps=100)
    found = numbers(options)
    steps = {name: found[name] for name in ("sampling_prob", "noise_multiplier")}
    event = poisson_gaussian_event(**steps, num_steps=options.num_steps)
    epsilon = epsilon_pld(event, found["delta"])
    assert 0.98 * options.epsilon < epsilon <= options.epsilon


def test_ledger_has_two_rows_for_each_training(tmp_path: Path) -> None:
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-5), num_records_public=1000)
    before, step = len(ledger.entries()), StepClass(sampling_prob=0.01, noise_multiplier=1.0)
    planned = [
        PlannedTraining(label=str(each), step_class=step, num_steps=5, delta=1e-5) for each in range(7)
    ]
    for held in ledger.reserve("scans", planned):
        ledger.settle(held, 3)
    options = Options(num_records=1000, expected_batch_size=10, num_steps=5, num_trials=7)
    assert len(ledger.entries()) - before == numbers(options)["ledger_rows"]


@pytest.mark.ci
def test_checkpoint_holds_weights_and_two_moments_and_the_sum_eight_bytes_for_each(tmp_path: Path) -> None:
    config = make_config()
    encoder = train(config, make_data(), checkpoints=CheckpointFolder(tmp_path / "t", every_steps=6)).encoder
    weights = sum(parameter.numel() for parameter in encoder.parameters())
    options = Options(num_records=1000, expected_batch_size=10, num_steps=5, num_weights=weights)
    found = numbers(options)
    saved = torch.load(tmp_path / "t/checkpoint.pt", weights_only=True)
    tensors = [*saved["model"].values()]
    for state in saved["optimizer"]["state"].values():
        tensors += [each for each in state.values() if isinstance(each, torch.Tensor) and each.numel() > 1]
    size = sum(each.numel() * each.element_size() for each in tensors)
    assert math.isclose(size, found["checkpoint_bytes"], rel_tol=0.02)
    total = no_sum(encoder)
    assert total.numel() * total.element_size() == found["sum_bytes_per_worker"]
