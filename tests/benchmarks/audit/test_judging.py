"""From releases to a verdict: the bound is honest, and the law of the noise is tested on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.audit import judging
from benchmarks.audit.judging import Claim, Releases, judge

CLAIM = Claim(epsilon=1.0, delta=0.127, noise_std=2.0)


def _released(noise: NDArray[np.float64], clean: float = 0.0) -> Releases:
    return Releases(noise + clean, np.full_like(noise, clean))


def _noise(seed: int, shape: tuple[int, ...] = (800, 1, 2, 2)) -> NDArray[np.float64]:
    return 2.0 * np.random.default_rng(seed).standard_normal(shape)


def test_bound_is_taken_on_runs_that_nothing_was_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score that knows the runs of the second quarter by heart shows nothing on the others."""
    worlds = [_released(_noise(seed)) for seed in range(2)]
    known = {each.tobytes() for each in worlds[1].noisy[200:400]}

    def by_heart(noisy: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([float(each.tobytes() in known) for each in noisy])

    monkeypatch.setattr(judging, "_scores", lambda *given: iter([by_heart]))
    assert judge("x", *worlds, CLAIM, confidence=0.95).epsilon_lower_bound == 0.0


def test_clear_difference_is_shown_and_the_noise_is_as_claimed() -> None:
    result = judge("x", _released(_noise(0)), _released(_noise(1), clean=9.0), CLAIM, confidence=0.95)
    assert result.exceeds
    assert result.noise_as_claimed


@pytest.mark.parametrize("seed", range(3))
def test_equal_laws_show_nothing(seed: int) -> None:
    worlds = (_released(_noise(2 * seed)), _released(_noise(2 * seed + 1)))
    result = judge("x", *worlds, CLAIM, confidence=0.95)
    assert result.epsilon_lower_bound == 0.0
    assert result.as_expected


def _repeated(seed: int, axis: int) -> NDArray[np.float64]:
    return np.repeat(_noise(seed).take([0], axis=axis), 2, axis=axis)


@pytest.mark.parametrize(
    "noises",
    [
        [1.2 * _noise(0), 1.2 * _noise(1)],
        [0.8 * _noise(0), 0.8 * _noise(1)],
        [_repeated(0, 2), _repeated(1, 2)],
        [_repeated(0, 3), _repeated(1, 3)],
    ],
    ids=["too loud", "too quiet", "repeated across steps", "repeated across tensors"],
)
def test_noise_of_another_law_is_seen(noises: list[NDArray[np.float64]]) -> None:
    result = judge("x", *map(_released, noises), CLAIM, confidence=0.95, defect="noise")
    assert not result.noise_as_claimed
    assert result.as_expected
