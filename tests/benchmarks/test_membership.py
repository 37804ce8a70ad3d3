"""Membership inference: rates, scores and what it refuses."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from benchmarks.membership import (
    ATTACK_STEP,
    MembershipOptions,
    _members_and_others,
    attack,
    main,
    view_alignment,
)
from dpgcl_core.errors import ConfigError, DataError
from tests.trainers.conftest import make_config, make_records
from trainers.config.training import NetworkConfig, ViewConfig
from trainers.data.dataset import Dataset
from trainers.data.loading import load_dataset
from trainers.data.records import Records
from trainers.models.encoder import build_encoder
from trainers.views.image_views import make_views

_ENCODER = build_encoder(NetworkConfig(name="tiny_cnn", embedding_dim=8), (1, 8, 8), seed=0)


def _alignment(records):  # type: ignore[no-untyped-def]
    config = make_config(views=ViewConfig(min_crop_area=0.3), public_seed=1)
    return view_alignment(_ENCODER, records, config, num_views=4)


def test_attack_on_equal_scores_is_guessing() -> None:
    found = attack(np.zeros(150), np.zeros(200))
    assert (found.true_positive_rate, found.false_positive_rate, found.auc) == (0, 0, 0.5)


def test_attack_on_separated_scores_finds_everyone() -> None:
    found = attack(np.linspace(2, 3, 150), np.linspace(0, 1, 200))
    assert (found.true_positive_rate, found.highest_true_positive_rate, found.auc) == (1, 1, 1)


@pytest.mark.parametrize("count", [100, 199, 200, 1000])
def test_attack_accuses_at_most_one_percent_of_non_members(count: int) -> None:
    scores = np.random.default_rng(0).normal(size=count)
    found = attack(scores + 0.5, scores)
    assert found.false_positive_rate == count // 100 / count


def test_attack_rate_is_that_of_the_gaussian_test() -> None:
    generator = np.random.default_rng(1)
    found = attack(generator.normal(1, 1, 20_000), generator.normal(0, 1, 20_000))
    # P[N(1, 1) > 2.326] = 0.0924; AUC = Φ(1/√2) = 0.7602
    assert found.true_positive_rate == pytest.approx(0.0924, abs=0.015)
    assert found.auc == pytest.approx(0.7602, abs=0.01)
    assert found.lowest_true_positive_rate < found.true_positive_rate < found.highest_true_positive_rate


def test_attack_without_a_hundred_non_members_is_refused() -> None:
    with pytest.raises(DataError, match="100 non-members"):
        attack(np.zeros(10), np.zeros(99))


def test_view_alignment_is_the_mean_cosine_of_all_pairs() -> None:
    records, config = make_records(3), ViewConfig(min_crop_area=0.3)
    views = make_views(
        torch.from_numpy(records.images), records.ids, config=config, seed=1, step=ATTACK_STEP, num_views=4
    )
    expected = []
    with torch.no_grad():
        for of_record in views:
            embedded = _ENCODER(of_record)
            expected.append(np.mean([float(a @ b) for a, b in itertools.combinations(embedded, 2)]))
    np.testing.assert_allclose(_alignment(records), expected, atol=1e-6)


def test_view_alignment_of_a_record_depends_on_no_other() -> None:
    records = make_records(140)
    rows = np.array([139, 7])
    np.testing.assert_allclose(_alignment(records.take(rows)), _alignment(records)[rows], atol=1e-6)


def test_view_alignment_leaves_the_mode_of_the_encoder() -> None:
    _ENCODER.train()
    _alignment(make_records(2))
    assert _ENCODER.training


@pytest.mark.parametrize("dataset", ["npz:scans.npz", "csv:pairs.csv", "webdataset:pairs.tar"])
def test_membership_inference_on_data_of_ones_own_is_refused(dataset: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot run on data of your own; got .* Use a built-in data set"):
        MembershipOptions(dataset=dataset)


@pytest.mark.parametrize("dataset", ["shapes", "shapes:200"])
def test_membership_inference_on_pairs_is_refused(dataset: str) -> None:
    with pytest.raises(ConfigError, match=r"data of your own|does not support image-text pairs"):
        MembershipOptions(dataset=dataset)


def test_members_and_non_members_share_no_image() -> None:
    members, others = _members_and_others(MembershipOptions(num_members=300))
    images = [image.tobytes() for part in (members, others) for image in part.images]
    assert len(members) == 300
    assert len(set(images)) == len(images) == len({i.tobytes() for i in load_dataset("digits").train.images})


def test_members_that_leave_too_few_others_are_refused() -> None:
    with pytest.raises(DataError, match="smaller num_members"):
        _members_and_others(MembershipOptions(num_members=1750))


def test_repeated_images_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    once = make_records(150)
    twice = Records(images=np.concatenate([once.images] * 2), ids=np.arange(300, dtype=np.uint64))
    data = Dataset(name="digits", train=twice, test=None, is_builtin=True)
    monkeypatch.setattr("benchmarks.membership.load_dataset", lambda name: data)
    parts = _members_and_others(MembershipOptions(num_members=40))
    assert [len(part) for part in parts] == [40, len({i.tobytes() for i in once.images}) - 40]


@pytest.mark.ci
def test_command_attacks_all_three_encoders(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num-steps", "2", "--num-views", "2", "--json"]) == 0
    attacks = json.loads(capsys.readouterr().out)["attacks"]
    assert list(attacks) == ["untrained", "private", "non-private"]
    assert all(found["false_positive_rate"] <= 0.01 for found in attacks.values())


@pytest.mark.parametrize(
    "arguments", [["--epsilon", "inf"], ["--num-views", "1"], ["--num-members", "0"], ["--dataset", "digit"]]
)
def test_command_refuses_bad_input(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(arguments)
