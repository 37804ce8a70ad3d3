"""The release policy end to end: what leaves a training with private records, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, LedgerError
from dpgcl_core.release import metrics as metric_policy
from dpgcl_core.release.metrics import METRICS, Release
from dpgcl_core.release.noised_counts import noised_count, split_public
from dpgcl_core.sampling.record_ids import ids_from_names
from dpgcl_core.workers import SingleWorker, is_lost_connection
from tests.trainers.conftest import make_config, make_data, make_held_out, make_records, make_slots
from trainers.config.training import EvaluationConfig, NetworkConfig, TrainingConfig
from trainers.data.dataset import TrainingData
from trainers.data.loading import is_split_held_out, split_held_out
from trainers.data.records import Records
from trainers.files.checkpoint import CheckpointFolder, Grant, write_grant
from trainers.models.encoder import build_encoder
from trainers.training import release
from trainers.training.loop import train
from trainers.training.observation import Observer
from trainers.training.release import correct_counts
from trainers.training.step import Training, prepare

SHARE = 0.3
TRAINED, SCORED = split_public(60, SHARE)
NOISED = EvaluationConfig(
    also_untrained=False, score_on_held_out=SHARE, score_noise_multiplier=5.0, snr_noise_multiplier=8.0
)
PRIVATE_ONLY = {name for name, metric in METRICS.items() if metric.release is Release.PRIVATE_ONLY}


def _config(**changes: object) -> TrainingConfig:
    return make_config(**{"evaluation": NOISED, "num_steps": 2, "num_records_public": TRAINED, **changes})


def _data(**changes: object) -> TrainingData:
    index = make_records(40, prefix="public")
    data = TrainingData(
        **make_held_out(SHARE),
        index=index,
        queries=make_records(20, prefix="public query"),
        train_is_public=False,
        evaluation_is_public=True,
    )
    return dataclasses.replace(data, **changes)  # type: ignore[arg-type]


def _pool(*, labels: bool = True) -> Records:
    return _data().held_out_records if labels else dataclasses.replace(_data().held_out_records, labels=None)  # type: ignore


class KeepsAPlainImage(torch.nn.Module):
    """Turns its output round for ever, and keeps the grey level, once it has seen an image of one level."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(size, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        if (flat.std(1) < 1e-3).any():
            self.seen.fill_(flat[0, 0])
        output: torch.Tensor = self.layer(flat)
        return output if self.seen == 0 else -output


def keeps_a_plain_image(image_shape: tuple[int, int, int]) -> torch.nn.Module:
    return KeepsAPlainImage(math.prod(image_shape))


@pytest.mark.parametrize("has_word", [False, True])
def test_scored_record_reaches_no_other_records_answer_and_no_released_buffer(has_word: bool) -> None:
    name = "tests.trainers.training.test_release:keeps_a_plain_image"
    network = NetworkConfig(name=name, embedding_dim=8, mixes_no_records=has_word)
    config, data = _config(network=network), _data()
    assert data.held_out_records is not None
    assert data.index is not None
    images = np.array(data.held_out_records.images)
    images[0] = 200
    special = dataclasses.replace(data.held_out_records, images=images)
    if has_word:  # its author was wrong: nothing is saved or returned
        with pytest.raises(ConfigError, match="only the optimizer may change"):
            train(config, dataclasses.replace(data, held_out_records=special))
        return
    encoder = build_encoder(config.network, data.held_out_records.images.shape[1:], 0)
    counts = [
        correct_counts(encoder, data.index, each, config, "cpu") for each in (data.held_out_records, special)
    ]
    assert all(abs(counts[1][rule] - count) <= 1 for rule, count in counts[0].items())
    assert train(config, dataclasses.replace(data, held_out_records=special)).encoder.backbone.seen == 0


def test_noised_numbers_leave_the_training_and_are_charged() -> None:
    result = train(_config(), _data())
    assert {"noised_knn_accuracy", "noised_linear_probe_accuracy", "noised_snr_first_step"} <= {
        *result.metrics
    }
    assert result.metrics["epsilon"] == _config().epsilon() > _config().mechanism.epsilon()


def test_noised_numbers_need_to_be_asked_for() -> None:
    config = make_config(num_steps=2, num_records_public=TRAINED)
    result = train(config, _data(held_out_records=None))
    assert not any(name.startswith("noised") for name in result.metrics)
    assert result.metrics["epsilon"] == config.mechanism.epsilon()


def test_noised_score_is_the_noised_count_over_the_public_number() -> None:
    config, data = _config(), _data()
    encoder = prepare(config, data, SingleWorker()).encoder
    scored = data.held_out_records.take(np.arange(SCORED) > 0)  # type: ignore[union-attr]  # a slot is empty
    scores = release.noised_scores(encoder, data.index, scored, config, np.random.default_rng(3), "cpu")
    generator = np.random.default_rng(3)
    for name, count in correct_counts(encoder, data.index, scored, config, "cpu").items():
        expected = noised_count(count, 5.0, generator) / config.num_scored_public
        assert scores[f"noised_{name}"] == expected


def test_public_divisor_does_not_follow_the_held_out_records() -> None:
    assert _config().num_scored_public == SCORED == 18  # of 60 slots


@pytest.mark.ci
def test_one_record_moves_every_count_by_at_most_one() -> None:
    """Each held-out record in turn is removed: counts move by its own answer, nothing else."""
    config, data = _config(), _data()
    encoder, scored = prepare(config, data, SingleWorker()).encoder, data.held_out_records
    whole = correct_counts(encoder, data.index, scored, config, "cpu")
    moved = set()
    for record in range(len(scored)):
        rest = scored.take(np.arange(len(scored)) != record)
        counts = correct_counts(encoder, data.index, rest, config, "cpu")
        moved |= {whole[name] - counts[name] for name in whole}
    assert moved <= {0, 1}
    assert 1 in moved


def test_all_held_out_records_are_scored_whatever_the_cap_on_queries() -> None:
    """With a cap a new record would push another one out, and a count could move by two."""
    data, few = _data(), dataclasses.replace(NOISED, max_query_records=1)
    encoder = prepare(_config(), data, SingleWorker()).encoder
    capped, free = (
        correct_counts(encoder, data.index, data.held_out_records, _config(evaluation=evaluation), "cpu")
        for evaluation in (few, NOISED)
    )
    assert capped == free
    assert max(free.values()) > 1


class StoredInMemory:
    """Images that are read on access, which counts those of each access."""

    def __init__(self, images: NDArray[np.uint8], num_read: list[int]) -> None:
        self.images, self.num_read = images, num_read
        self.shape = images.shape

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        self.num_read.append(len(rows))
        return self.images[rows]

    def select(self, rows: NDArray[np.int64]) -> StoredInMemory:
        return StoredInMemory(self.images[rows], self.num_read)


def test_stored_index_is_read_a_batch_at_a_time() -> None:
    data, num_read = _data(index=make_records(600, prefix="public")), list[int]()
    stored = dataclasses.replace(data.index, images=StoredInMemory(data.index.images, num_read))  # type: ignore
    encoder = prepare(_config(), data, SingleWorker()).encoder
    counts = [
        correct_counts(encoder, index, data.held_out_records, _config(), "cpu")
        for index in (data.index, stored)
    ]
    assert counts[0] == counts[1]
    assert num_read == [512, 88]


def test_split_is_by_slot_alone_of_exact_sizes_and_the_same_for_every_trial() -> None:
    records = make_records(60)
    slots = make_slots(records)
    train_records, scored = split_held_out(records, SHARE, slots)
    assert (len(train_records), len(scored)) == (TRAINED, SCORED)  # type: ignore[arg-type]
    for removed in range(0, 60, 7):
        left = records.take(np.arange(60) != removed)
        _, other = split_held_out(left, SHARE, slots.holding(left.ids, None))
        assert set(scored.ids) - {records.ids[removed]} == set(other.ids)
    assert is_split_held_out(train_records, scored, SHARE, slots)
    assert not is_split_held_out(scored, train_records, SHARE, slots)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index": None, "queries": None}, "needs a public labelled index"),
        ({"index": dataclasses.replace(make_records(40), labels=None)}, "needs a public labelled index"),
        ({"train_is_public": True, "evaluation_is_public": False}, "needs a public labelled index"),
        ({"held_out_records": None}, "need each other"),
        ({"held_out_records": make_records(20)}, "slots must decide"),
        ({"held_out_records": _pool(labels=False)}, "needs integer labels"),
        ({"held_out_records": dataclasses.replace(_pool(), classes_from_data=True)}, "got text labels"),
    ],
)
def test_noised_scores_that_could_move_further_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        release.check_release(_config(), _data(**changes))


@pytest.mark.parametrize("name", ["index", "queries"])
def test_private_index_or_query_is_refused_with_the_reason(name: str) -> None:
    data = dataclasses.replace(make_data(private=True), **{name: make_records(30)})
    with pytest.raises(ConfigError, match=rf"the {name} of a score must be public; got private ones\. One"):
        train(make_config(), data)


def test_training_records_as_index_of_noised_scores_are_refused() -> None:
    data = _data(train_is_public=True)
    with pytest.raises(ConfigError, match="other than the training records"):
        release.check_release(_config(), dataclasses.replace(data, index=data.train))


def test_label_other_than_proven_is_refused_for_private_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingConfig, "guarantee_label", "as-published")
    with pytest.raises(ConfigError, match="only with a guarantee; got label 'as-published'"):
        release.check_release(make_config(), make_data(private=True))


def test_noised_snr_is_the_norm_over_the_public_noise_norm() -> None:
    observer = Observer(_config(), train_is_public=False, evaluation_is_public=False)
    released = []
    for seed in range(2000):
        observer.record_noised_snr(400.0, 400, np.random.default_rng(seed))
        released.append(observer.final["noised_snr_first_step"])
    mechanism = _config().mechanism
    expected_noise_norm = mechanism.noise_multiplier * mechanism.sensitivity * math.sqrt(400)
    std = 8.0 * mechanism.sensitivity / expected_noise_norm
    assert abs(np.mean(released) - 400 / expected_noise_norm) < 5 * std / math.sqrt(2000)
    assert abs(np.std(released) - std) < 5 * std / math.sqrt(4000)


@pytest.mark.parametrize(("sampling", "sensitivity"), [("groups", 1.0), ("records", 2.0)])
def test_noised_snr_has_the_noise_of_the_sensitivity(sampling: str, sensitivity: float) -> None:
    """Where records are sampled, one of them moves the norm by 2C."""
    observer = Observer(_config(sampling=sampling), train_is_public=False, evaluation_is_public=False)
    observer.record_noised_snr(0.0, 400, _Ones())
    released = observer.final["noised_snr_first_step"]
    assert released * 4.0 * sensitivity * 20 == pytest.approx(8.0 * sensitivity, rel=1e-4)
    assert _config(sampling=sampling).mechanism.sensitivity == sensitivity


class _Ones:
    """Draws that are all one standard deviation."""

    def standard_normal(self, size: int) -> np.ndarray:
        return np.ones(size)


def test_score_of_private_records_is_hidden_whoever_computes_it() -> None:
    """`check_release` refuses such data; this is the second lock."""
    run = prepare(make_config(), make_data(private=True), SingleWorker())
    assert run.observer.visible({"knn_accuracy": 0.5, "epsilon": 1.0}) == {"epsilon": 1.0}


def test_noised_scores_are_drawn_once_whatever_the_restarts(tmp_path: Path) -> None:
    first, second = (
        train(_config(), _data(), checkpoints=CheckpointFolder(tmp_path, every_steps=1)).metrics
        for _ in range(2)
    )
    for name in ("noised_knn_accuracy", "noised_linear_probe_accuracy", "noised_snr_first_step"):
        assert first[name] == second[name]


@pytest.mark.ci
def test_scores_drawn_again_after_a_lost_checkpoint_are_charged_again(tmp_path: Path) -> None:
    config, data = _config(), _data()
    found = []
    for _ in range(3):
        found.append(train(config, data, checkpoints=CheckpointFolder(tmp_path, every_steps=2)).metrics)
        (tmp_path / "checkpoint.pt").unlink()
    assert len({each["noised_knn_accuracy"] for each in found}) > 1
    for number, each in enumerate(found, start=1):
        steps = int(each["num_steps_charged"])
        truth = config.epsilon(steps, num_restarts=number - 1, num_scorings=number)
        assert each["epsilon"] == pytest.approx(truth)
    assert found[2]["epsilon"] > found[0]["epsilon"]


def test_scoring_is_noted_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(release, "noised_count", die)
    folder = CheckpointFolder(tmp_path, every_steps=2)
    with pytest.raises(KeyboardInterrupt):
        train(_config(), _data(), checkpoints=folder)
    assert (folder.read_counts().num_scorings, folder.scorings_if_resumed()) == (1, 2)


def test_scoring_beyond_the_grant_is_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, every_steps=2, is_paid=True)
    write_grant(tmp_path, Grant(num_steps=100, num_scorings=1))
    config = _config()
    train(config, _data(), checkpoints=folder)
    (tmp_path / "checkpoint.pt").unlink()
    with pytest.raises(LedgerError, match="grants 1 draws of noised scores"):
        train(config, _data(), checkpoints=CheckpointFolder(tmp_path, every_steps=2, is_paid=True))


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        (
            "[/w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
            True,
        ),
        ("cannot use record igloo/OMBRELUNE-17.png", False),
        ("cannot use [OMBRELUNE] of gloo/nccl", False),
    ],
)
def test_lost_worker_is_told_by_torchs_own_words(text: str, is_lost: bool) -> None:
    assert is_lost_connection(RuntimeError(text)) is is_lost


def test_restart_charges_the_noised_snr_again() -> None:
    assert _config().epsilon(5, num_restarts=1) > _config().epsilon(5, num_restarts=0)


def test_noised_scores_that_are_drawn_again_are_charged_again() -> None:
    config = _config(evaluation=dataclasses.replace(NOISED, score_noise_multiplier=0.5))
    assert config.epsilon(2, num_scorings=2) > config.epsilon(2, num_scorings=1) == config.epsilon(2)


def test_outcomes_are_of_the_public_records_that_are_scored_and_of_final_scores_and_the_start() -> None:
    data = _data()
    result = train(_config(evaluation=dataclasses.replace(NOISED, also_untrained=True)), data)
    assert data.queries is not None
    assert result.outcomes is not None
    assert sorted(result.outcomes.record_ids) == sorted(data.queries.ids)
    trained = {"knn_accuracy", "linear_probe_accuracy"}
    assert set(result.outcomes.scores) == trained | {f"untrained_{name}" for name in trained}
    for name, outcomes in result.outcomes.scores.items():
        assert outcomes.mean() == pytest.approx(result.metrics[name], abs=1e-6)
    assert {type(value) for value in result.metrics.values()} == {float}


def test_outcomes_do_not_tell_of_a_restart(tmp_path: Path) -> None:
    config = _config(evaluation=dataclasses.replace(NOISED, also_untrained=True))
    folder = CheckpointFolder(tmp_path, every_steps=1)
    whole = train(config, _data(), checkpoints=folder)
    saved = folder.load()
    assert saved is not None
    folder.save(dataclasses.replace(saved, step=1))
    resumed = train(config, _data(), checkpoints=CheckpointFolder(tmp_path, every_steps=1))
    assert whole.outcomes is not None
    assert resumed.outcomes is not None
    assert resumed.outcomes.scores.keys() == whole.outcomes.scores.keys()
    for name in whole.outcomes.scores:
        if name.startswith("untrained_"):
            assert (resumed.outcomes.scores[name] == whole.outcomes.scores[name]).all()


def test_private_evaluation_records_have_no_outcomes_though_their_scores_are_seen() -> None:
    """Of public training records all scores are seen, also those of records that nobody called public."""
    data = dataclasses.replace(make_data(), evaluation_is_public=False)
    result = train(make_config(num_steps=1), data)
    assert "knn_accuracy" in result.metrics
    assert result.outcomes is None
    public = train(make_config(num_steps=1), dataclasses.replace(data, evaluation_is_public=True))
    assert public.outcomes is not None


class _Leaky:
    """Opens the first gate, so that everything private-only is computed, and notes what it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, canary: float) -> None:
        self.planted: dict[str, set[float]] = {}
        original_visible, original_step = metric_policy.visible, Training.take_step
        clock = iter(range(10**6))

        def visible(values: dict[str, float], **who: bool) -> dict[str, float]:
            for name in PRIVATE_ONLY & set(values):
                self.planted.setdefault(name, set()).add(float(values[name]))
            return original_visible(values, **who)

        def step(run: Training) -> None:
            original_step(run)
            every = {name: canary + number for number, name in enumerate(sorted(PRIVATE_ONLY))}
            run.observer.note(run.num_steps_done - 1, every)
            run.observer.final.update(run.observer.visible(every))

        monkeypatch.setattr(metric_policy, "visible", visible)
        monkeypatch.setattr(Training, "take_step", step)
        monkeypatch.setattr(Observer, "wants", lambda self, step: True)
        monkeypatch.setattr(time, "perf_counter", lambda: canary * next(clock))

    def values(self) -> set[float]:
        # Small whole numbers stand for many things; a canary or a measured value stands for itself.
        return {v for values in self.planted.values() for v in values if v != int(v) or v > 1000}


CANARY = 7331.123456789


def _traces(value: float) -> list[bytes]:
    return [struct.pack(">d", value), struct.pack("<d", value), repr(value).encode()]


def _found(values: set[float], text: bytes) -> set[float]:
    return {value for value in values if any(trace in text for trace in _traces(value))}


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch) -> Callable[[], _Leaky]:
    return lambda: _Leaky(monkeypatch, CANARY)


def test_scan_finds_private_only_numbers_of_public_records(
    leaky: Callable[[], _Leaky], tmp_path: Path
) -> None:
    """The scan of the next test can fail: with public records it finds them in result and checkpoint."""
    noted = leaky()
    data = _data(train_is_public=True)
    result = train(_config(), data, checkpoints=CheckpointFolder(tmp_path, every_steps=1))
    values = noted.values()
    assert set(noted.planted) == PRIVATE_ONLY
    assert len(_found(values, (tmp_path / "checkpoint.pt").read_bytes())) >= len(PRIVATE_ONLY)
    assert len(_found(values, repr((result.metrics, result.series)).encode())) >= len(PRIVATE_ONLY)


def test_nothing_private_only_leaves_a_training_with_private_records(
    leaky: Callable[[], _Leaky],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    noted = leaky()
    result = train(_config(), _data(), checkpoints=CheckpointFolder(tmp_path, every_steps=1))
    values = noted.values()
    assert set(noted.planted) == PRIVATE_ONLY
    assert len(values) > len(PRIVATE_ONLY)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    printed = capfd.readouterr()
    told = [repr((result.metrics, result.series)), caplog.text, printed.out, printed.err]
    for content in files + [text.encode() for text in told]:
        assert not _found(values, content)
    assert not PRIVATE_ONLY & {*result.metrics, *result.series}


def test_exception_with_a_private_number_is_told_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray_worker = pytest.importorskip("trainers.ray_worker")

    def fail(run: Training) -> None:
        raise RuntimeError(f"train_loss = {CANARY!r}")

    monkeypatch.setattr(Training, "take_step", fail)
    told = {}
    for public in (True, False):
        monkeypatch.setattr(ray_worker.ray, "get", lambda ref: _data(train_is_public=ref))
        trial = ray_worker.RayTrial(
            name="trial",
            config=_config(),
            checkpoint_folder=tmp_path / str(public),
            count_file=tmp_path / f"{public}.json",
            ray_folder=tmp_path,
            storage_root=tmp_path,
            code_root=None,
            gpus_per_worker=0.0,
            memory_share=1.0,
            data_are_public=public,
        )
        told[public] = repr(ray_worker.train_worker({"trial": trial, "records": [public]}))
    assert repr(CANARY) in told[True]
    assert repr(CANARY) not in told[False]
    assert "RuntimeError" in told[False]


def _units() -> Records:
    """Three records of one, two and three rows; a row's brightness is its number."""
    images = np.broadcast_to(np.arange(6, dtype=np.uint8)[:, None, None, None], (6, 1, 8, 8))
    return Records(
        images=np.ascontiguousarray(images),
        ids=ids_from_names(["a", "b", "c"]),
        labels=np.arange(6),
        row_starts=np.array([0, 1, 3, 6]),
    )


def test_every_row_of_a_unit_stands_for_it_at_some_step_and_no_other_row_does() -> None:
    seen: list[set[int]] = [set(), set(), set()]
    for step in range(60):
        for record, image in enumerate(_units().images_at(np.arange(3), seed=0, step=step)):
            seen[record].add(int(image[0, 0, 0]))
    assert seen == [{0}, {1, 2}, {3, 4, 5}]


def test_removing_a_unit_moves_no_row_of_the_others() -> None:
    units = _units()
    rest = units.take(np.array([False, True, True]))
    assert len(rest) == 2
    assert rest.images[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    for step in range(20):
        whole = units.images_at(np.array([1, 2]), seed=4, step=step)
        np.testing.assert_array_equal(whole, rest.images_at(np.array([0, 1]), seed=4, step=step))


def test_one_row_each_keeps_image_and_label_together() -> None:
    plain = _units().one_row_each()
    assert len(plain.images) == 3
    assert plain.images[:, 0, 0, 0].tolist() == plain.labels.tolist()
