"""The average of the iterates: what it is, who sees it, and that a kill does not change it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpgcl_core.clipping.types import trainable_parameters
from dpgcl_core.errors import StorageError
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import make_config, make_data
from tests.trainers.files.test_checkpoint import _crashed, _folder
from trainers.config.training import NetworkConfig, OptimizerConfig, TrainingConfig
from trainers.export.sweep_results import released_state
from trainers.models.encoder import Encoder, build_encoder
from trainers.training import scores
from trainers.training.averaging import WeightAverage
from trainers.training.loop import train
from trainers.training.step import prepare

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

AVERAGED = OptimizerConfig(ema_decay=0.7)
BYOL = {
    "method": "byol_groups",
    "num_augmentations": 0,
    "network": NetworkConfig(name="small_cnn", embedding_dim=8, predictor=True),
}


def _config(**changes: object) -> TrainingConfig:
    return make_config(**({"seeded_non_private": True, "optimizer": AVERAGED} | changes))


def _weights(encoder: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainable_parameters(encoder)])


def _encoder() -> Encoder:
    return build_encoder(NetworkConfig(name="tiny_cnn", embedding_dim=4), (1, 8, 8), 0)


def _set(encoder: Encoder, value: float) -> None:
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.fill_(value)


def test_average_is_that_of_the_iterates_with_a_rising_decay() -> None:
    encoder = _encoder()
    _set(encoder, 1.0)
    average, expected = WeightAverage(encoder, 0.25), 1.0
    for step, value in enumerate((2.0, -3.0, 0.5, 4.0)):
        _set(encoder, value)
        average.update(encoder, step)
        decay = min(0.25, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
        assert torch.allclose(_weights(average.network), torch.tensor(expected))


def test_target_keeps_its_decay_from_the_first_step() -> None:
    encoder = _encoder()
    _set(encoder, 1.0)
    target = WeightAverage(encoder, 0.75, rising=False)
    _set(encoder, 0.0)
    target.update(encoder, 0)
    assert torch.allclose(_weights(target.network), torch.tensor(0.75))


def test_average_shares_the_weights_that_are_not_trained() -> None:
    encoder = _encoder()
    encoder.head.requires_grad_(False)
    average = WeightAverage(encoder, 0.9)
    assert average.network.head[0].weight is encoder.head[0].weight
    assert not any(name.startswith("head") for name in average.state())
    before = encoder.head[0].weight.clone()
    average.update(encoder, 0)
    assert torch.equal(encoder.head[0].weight, before)


def test_training_averages_the_iterate_of_every_step() -> None:
    run = prepare(_config(), make_data(), SingleWorker())
    expected = _weights(run.encoder)
    for step in range(4):
        run.take_step()
        decay = min(0.7, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * _weights(run.encoder)
    assert run.average is not None
    assert torch.allclose(_weights(run.average.network), expected, atol=1e-6)


def test_average_does_not_reach_the_iterates() -> None:
    runs = [
        prepare(_config(optimizer=optimizer), make_data(), SingleWorker())
        for optimizer in (AVERAGED, OptimizerConfig())
    ]
    for run in runs:
        run.take_step()
        run.take_step()
    assert torch.equal(_weights(runs[0].encoder), _weights(runs[1].encoder))


def test_average_is_what_is_scored_and_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[torch.Tensor] = []
    original = scores.all_scores

    def spy(task: object, encoder: Encoder, *given: object, **named: object) -> dict[str, float]:
        scored.append(_weights(encoder))
        return original(task, encoder, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(scores, "all_scores", spy)
    averaged = train(_config(), make_data())
    last = train(_config(optimizer=OptimizerConfig()), make_data())
    assert torch.equal(scored[0], _weights(averaged.encoder))
    assert not torch.equal(scored[0], scored[1])
    assert torch.equal(scored[1], _weights(last.encoder))


def test_target_alone_is_not_what_is_returned() -> None:
    run = prepare(_config(optimizer=OptimizerConfig(), **BYOL), make_data(), SingleWorker())
    assert run.average is not None
    assert run.released_network is run.encoder


@pytest.mark.parametrize("changes", [{}, BYOL], ids=["averaged", "target"])
def test_seeded_resume_has_the_average_of_the_uninterrupted_run(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"seeded_non_private": True, "optimizer": AVERAGED} | changes
    whole = train(make_config(**config), make_data())
    _crashed(monkeypatch, tmp_path, 3, **config)
    resumed = train(make_config(**config), make_data(), checkpoints=_folder(tmp_path))
    assert torch.equal(_weights(whole.encoder), _weights(resumed.encoder))


def test_checkpoint_without_an_average_serves_a_training_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _crashed(monkeypatch, tmp_path, 3)
    path = tmp_path / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    del saved["average"]  # as files were before averages
    torch.save(saved, path)
    train(make_config(), make_data(), checkpoints=_folder(tmp_path))
    assert _folder(tmp_path).read_counts().num_attempts == 2


def test_checkpoint_without_an_average_is_refused_where_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _crashed(monkeypatch, tmp_path, 3)
    with pytest.raises(StorageError, match=r"got none\. Restore the training's own ema_decay"):
        train(make_config(optimizer=AVERAGED), make_data(), checkpoints=_folder(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": OptimizerConfig()}, BYOL | {"optimizer": OptimizerConfig()}],
    ids=["averaged", "last", "target"],
)
def test_checkpoint_tells_which_weights_are_released(changes: dict[str, object], tmp_path: Path) -> None:
    config, folder = _config(**changes), _folder(tmp_path)
    result = train(config, make_data(), checkpoints=folder)
    saved = folder.load()
    assert saved is not None
    state = released_state(saved, averaged=bool(config.optimizer.ema_decay))
    assert state.keys() == result.encoder.state_dict().keys()
    for name, weights in result.encoder.state_dict().items():
        assert torch.equal(weights, state[name])


def test_average_of_another_network_is_refused() -> None:
    average = WeightAverage(_encoder(), 0.9)
    with pytest.raises(StorageError, match="got the average of another network"):
        average.load({"weight": torch.zeros(2)})
