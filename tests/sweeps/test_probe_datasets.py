"""`--probe-datasets` in planning: what is refused, and what the plan says."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpgcl_core.errors import DataError
from sweeps.service.planning.plan import SweepPlan
from tests.sweeps.support import write_npz
from trainers.data.dataset import TrainingData
from trainers.data.dataset_registry import DATA_SOURCES
from trainers.data.loading import load_dataset
from trainers.data.shapes import SHAPE_NAMES

SECRET_CLASSES = ("secret-axolotl", "secret-basilisk", "secret-capybara")
QUICK = ("--tiny", "--noise-multiplier", "1")
Plan = Callable[..., SweepPlan]


@pytest.fixture
def faces(tmp_path: Path) -> str:
    return write_npz(tmp_path / "faces.npz", 90)


@pytest.mark.parametrize("own", [True, False])
def test_training_data_are_no_other_data_set(own: bool, faces: str, refusal: Callable[..., str]) -> None:
    dataset = faces if own else "digits"
    message = refusal(*QUICK, "--dataset", dataset, "--probe-datasets", dataset)
    assert "other than the training data and --evaluate-on" in message


def test_private_training_data_are_found_by_another_path(
    faces: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    other = faces.replace("faces.npz", "folder/../faces.npz")
    assert "other than the training data" in refusal(*QUICK, "--dataset", faces, "--probe-datasets", other)


def test_data_scored_on_are_no_other_data_set(faces: str, refusal: Callable[..., str]) -> None:
    message = refusal(*QUICK, "--dataset", faces, "--evaluate-on", "digits", "--probe-datasets", "digits")
    assert "other than the training data and --evaluate-on; got digits" in message


def test_copy_of_the_private_images_is_no_public_probe(
    faces: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    images = np.load(tmp_path / "faces.npz")["images"]
    np.savez(tmp_path / "copy.npz", images=images[::-1][:40], labels=np.arange(40) % 2)
    message = refusal(*QUICK, "--dataset", faces, "--probe-datasets", f"npz:{tmp_path / 'copy.npz'}")
    assert "probe_datasets must be public; it holds images of the private training data" in message


def test_unknown_probe_is_refused_before_data_are_read(refusal: Callable[..., str]) -> None:
    assert "did you mean 'digits'?" in refusal(*QUICK, "--probe-datasets", "digit")


def test_private_data_can_be_scored_on_probes_alone(faces: str, make_plan: Plan) -> None:
    plan = make_plan(*QUICK, "--expected-batch-size", "32", "--dataset", faces, "--probe-datasets", "digits")
    assert plan.data.evaluation_is_public
    assert plan.data.index is None
    assert [probe.name for probe in plan.data.probes] == ["digits"]
    assert any("which are public because the user named them" in note for note in plan.notes)
    assert not any("no scores" in note for note in plan.notes)


# Names of classes, for zero-shot scores


@pytest.fixture
def pets(tmp_path: Path) -> str:
    """Images whose labels are words that nobody else uses."""
    images = np.random.default_rng(3).integers(0, 256, (90, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "pets.npz", images=images, labels=np.array(SECRET_CLASSES)[np.arange(90) % 3])
    return f"npz:{tmp_path / 'pets.npz'}"


def test_names_of_private_classes_are_in_no_plan(pets: str, make_plan: Plan) -> None:
    small = ("--expected-batch-size", "32", "--dataset", pets)
    for more in ((), ("--evaluate-on", "digits"), ("--probe-datasets", "digits")):
        plan = make_plan(*QUICK, *small, *more)
        assert not any(name.encode() in pickle.dumps(plan) for name in SECRET_CLASSES)


def test_names_of_public_classes_are_neither_told_nor_noted(pets: str, make_plan: Plan) -> None:
    plan = make_plan(*QUICK, "--expected-batch-size", "32", "--dataset", pets, "--data-is", "public")
    assert plan.data.class_names == SECRET_CLASSES
    params = [plan.params(), *(trial.params for trial in plan.trials)]
    told = repr((plan.data, plan.notes, plan.source, params))
    assert not any(name in told for name in SECRET_CLASSES)


@pytest.mark.parametrize("evaluate_on", [None, "digits"])
def test_class_names_are_those_of_what_is_scored(evaluate_on: str | None, pets: str, make_plan: Plan) -> None:
    public = ("--dataset", pets, "--data-is", "public", "--expected-batch-size", "32")
    plan = make_plan(*QUICK, *public, *(("--evaluate-on", evaluate_on) if evaluate_on else ()))
    expected = DATA_SOURCES["digits"].class_names if evaluate_on else SECRET_CLASSES
    assert plan.data.class_names == expected


def test_probes_of_pairs_bring_their_class_names(make_plan: Plan) -> None:
    pairs = ("--dataset", "shapes:300", "--group-sizes", "4", "--expected-batch-size", "64")
    plan = make_plan(*QUICK, *pairs, "--probe-datasets", "digits")
    assert plan.data.class_names == SHAPE_NAMES
    assert [probe.class_names for probe in plan.data.probes] == [DATA_SOURCES["digits"].class_names]


def test_names_of_classes_that_nothing_is_scored_on_are_refused() -> None:
    records = load_dataset("digits").train
    with pytest.raises(DataError, match="got names and no queries"):
        TrainingData(
            train=records,
            index=None,
            queries=None,
            train_is_public=False,
            evaluation_is_public=False,
            class_names=DATA_SOURCES["digits"].class_names,
        )


# What a plan is


def test_sweep_with_other_probes_is_not_resumed(faces: str, make_plan: Plan) -> None:
    plain, probed = make_plan(*QUICK), make_plan(*QUICK, "--probe-datasets", faces)
    assert plain.fingerprint != probed.fingerprint


def test_trials_name_the_data_they_are_scored_on(faces: str, make_plan: Plan) -> None:
    small = ("--expected-batch-size", "32")
    scored = [
        make_plan(*QUICK, *small, *data).trials[0].params["scored_on"]
        for data in ((), ("--dataset", faces), ("--dataset", faces, "--evaluate-on", "digits"))
    ]
    assert scored == ["digits", None, "digits"]
