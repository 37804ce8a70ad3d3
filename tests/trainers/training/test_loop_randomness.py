"""Where a training's secrets come from, and what is released of a step that drew them from the stream."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dpgcl_core import private_step
from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from dpgcl_core.noise import chacha20, chunked_draw
from dpgcl_core.noise.chacha20 import SecureGenerator, SecureRandomness
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import Draws, SecretRandomness
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import Elsewhere, make_config, make_data, make_held_out, make_records
from trainers.config.training import EvaluationConfig, TrainingConfig
from trainers.data.dataset import TrainingData
from trainers.training import step
from trainers.training.loop import train
from trainers.training.step import prepare

Drawn = Counter[tuple[type, str]]
MULTIPLIER = 0.8
STD = MULTIPLIER  # the sensitivity is C = 1, for groups are sampled


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Counts the generators taken, by source and purpose."""
    taken: Drawn = Counter()
    for source in (SecureRandomness, SecretRandomness):

        def spy(self: object, step: int, purpose: str, *, source: type = source, own=source.generator):  # type: ignore[no-untyped-def]
            taken[source, purpose] += 1
            return own(self, step, purpose)

        monkeypatch.setattr(source, "generator", spy)
    return taken


@pytest.fixture
def on_grid(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the noise was on a grid, draw by draw."""
    found: list[bool] = []
    own = GaussianNoise.draw

    def spy(self: GaussianNoise, num_coordinates: int, generator: Draws, gpu: None = None) -> torch.Tensor:
        found.append(self.grid > 0)
        return own(self, num_coordinates, generator, gpu)

    monkeypatch.setattr(GaussianNoise, "draw", spy)
    return found


def _noised() -> tuple[TrainingConfig, TrainingData]:
    """A private training of two steps that releases two noised counts and a noised norm, too."""
    evaluation = EvaluationConfig(
        also_untrained=False, score_on_held_out=0.3, score_noise_multiplier=5.0, snr_noise_multiplier=8.0
    )
    public = make_records(40, prefix="public")
    data = dataclasses.replace(
        make_data(private=True, evaluation_is_public=True), index=public, **make_held_out(0.3)
    )
    return make_config(evaluation=evaluation, num_steps=2, num_records_public=42), data


@pytest.mark.ci
@pytest.mark.parametrize(
    ("private", "asked", "source"),
    [
        (True, None, SecureRandomness),
        (True, True, SecureRandomness),
        (False, True, SecureRandomness),
        (False, None, SecretRandomness),
        (False, False, SecretRandomness),
    ],
)
def test_training_draws_from_the_stream_for_private_data_or_where_asked(
    private: bool, asked: bool | None, source: type, drawn: Drawn, on_grid: list[bool]
) -> None:
    train(make_config(secure_noise=asked), make_data(private=private))
    assert drawn == {(source, purpose): 6 for purpose in ("sampling", "permutation", "noise")}
    assert on_grid == [source is SecureRandomness] * 6


def test_noised_releases_are_drawn_from_the_stream_on_a_grid(drawn: Drawn, on_grid: list[bool]) -> None:
    train(*_noised())
    assert drawn[SecureRandomness, "score noise"] == drawn[SecureRandomness, "snr noise"] == 1
    assert {source for source, _ in drawn} == {SecureRandomness}
    assert on_grid == [True] * 5  # two steps, one norm, two counts


@pytest.mark.parametrize("secure", [True, False])
def test_seeded_training_has_no_stream(secure: bool, drawn: Drawn) -> None:
    config = make_config(seeded_non_private=True, secure_noise=secure or None)
    if secure:
        with pytest.raises(ConfigError, match=r"secure_noise = True and a seed\. Leave out one of them"):
            train(config, make_data())
    else:
        train(config, make_data())
    assert not drawn


@pytest.mark.parametrize(
    ("private", "has_stream", "gpu"), [(True, False, None), (True, True, "cuda"), (False, False, "cuda")]
)
def test_noise_of_private_data_comes_from_the_stream_on_a_gpu_too(
    private: bool, has_stream: bool, gpu: str | None, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare(make_config(), make_data(private=private), SingleWorker())
    generator, draws = torch.Generator(), []
    monkeypatch.setattr(chacha20, "has_gpu_stream", lambda device: has_stream)
    monkeypatch.setattr(SecretRandomness, "gpu_generators", lambda self, device: lambda purpose: generator)
    monkeypatch.setattr(GaussianNoise, "draw", lambda self, *given: draws.append(given))
    noise_of = run.private_step._start_noise(0, run.config.mechanism.noise(), Elsewhere("cuda", run))
    assert noise_of is not None
    (part,) = chunked_draw.parts_of(num_trainable(run.encoder))
    noise_of(part)
    ((length, drawn_from, device),) = draws
    assert length == num_trainable(run.encoder)
    assert device == (gpu and torch.device(gpu))
    assert isinstance(drawn_from, SecureGenerator) == private
    assert drawn == ({(SecureRandomness, "noise"): 1} if private else {})


def test_seeded_noise_is_the_same_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(make_config(seeded_non_private=True), make_data(), SingleWorker())
    law, (part, *_) = run.config.mechanism.noise(), chunked_draw.parts_of(num_trainable(run.encoder))
    found = []
    for device in ("cpu", "cuda"):
        noise_of = run.private_step._start_noise(0, law, Elsewhere(device, run))
        found.append(noise_of(part))
    assert torch.equal(*found)


def test_private_records_are_refused_without_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "starting_encoder", lambda *_: pytest.fail("something was built"))
    with pytest.raises(ConfigError, match="cryptographic stream only"):
        train(make_config(secure_noise=False), make_data(private=True))


def _clean_and_released(
    monkeypatch: pytest.MonkeyPatch, **changes: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a step's clean and released sums, float64 `[num_parameters]`."""
    run = prepare(
        make_config(noise_multiplier=MULTIPLIER, sampling_prob=1.0, **changes),
        make_data(private="secure_noise" not in changes),
        SingleWorker(),
    )
    clean: list[torch.Tensor] = []
    released: list[torch.Tensor] = []
    own = chunked_draw.add_in_parts

    def spy(total: torch.Tensor, *args: Any, **kwargs: Any) -> float:
        clean.append(total.clone())
        norm = own(total, *args, **kwargs)
        released.append(total.clone())
        return norm

    monkeypatch.setattr(private_step, "add_in_parts", spy)
    run.take_step()
    assert len(clean) == 1
    assert float(clean[0].norm()) > 0
    return clean[0], released[0]


def test_released_sum_has_the_mechanisms_noise_around_the_clean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are five standard errors: a right law breaks one in a million times."""
    clean, released = _clean_and_released(monkeypatch)
    noise, root = (released - clean).numpy(), math.sqrt(len(clean))
    assert abs(noise.mean()) < 5 * STD / root
    assert abs(noise.std() - STD) < 5 * STD / (math.sqrt(2) * root)
    assert abs(noise.std() - 0.9 * STD) > 5 * STD / (math.sqrt(2) * root)  # a wrong one is rejected
    assert stats.kstest(noise / STD, "norm").pvalue > 1e-6
    assert stats.kstest(1.1 * noise / STD, "norm").pvalue < 1e-6


def test_noise_does_not_follow_the_clean_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    clean, released = _clean_and_released(monkeypatch)
    correlation = np.corrcoef(clean.numpy(), (released - clean).numpy())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(len(clean))


def _share_on_grid(sums: torch.Tensor) -> float:
    multiples = sums / GaussianNoise.on_grid(noise_multiplier=STD, sensitivity=1.0, num_coordinates=1).grid
    return float((multiples == multiples.round()).double().mean())


def test_released_sum_is_on_the_public_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    clean, released = _clean_and_released(monkeypatch)
    assert _share_on_grid(released) == 1.0
    assert _share_on_grid(clean) < 0.9


def test_released_sum_of_public_data_is_not_rounded_to_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    _, released = _clean_and_released(monkeypatch, secure_noise=None)
    assert _share_on_grid(released) < 0.99


def test_noise_of_the_stream_is_drawn_in_parts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_draw, "PART", 1000)
    clean, released = _clean_and_released(monkeypatch)
    assert stats.kstest((released - clean).numpy() / STD, "norm").pvalue > 1e-6
