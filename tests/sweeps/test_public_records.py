"""`--public-records` in planning: what is refused, and what plan and params say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sweeps.service.planning.plan import SweepPlan
from tests.sweeps.support import write_npz

QUICK = ("--tiny", "--noise-multiplier", "1", "--expected-batch-size", "32")
Plan = Callable[..., SweepPlan]


@pytest.fixture
def faces(tmp_path: Path) -> str:
    """Private images."""
    return write_npz(tmp_path / "faces.npz", 90)


def test_public_records_reach_the_training_in_the_shape_of_its_images(
    make_plan: Plan, tmp_path: Path
) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), dtype=np.uint8)
    np.savez(tmp_path / "colours.npz", images=colours)
    named = f"npz:{tmp_path / 'colours.npz'}"
    plan = make_plan(*QUICK, "--public-records", named, "--num-public-negatives", "5")
    assert plan.data.public_records is not None
    records = plan.data.public_records.records(5, seed=0, step=0, purpose="negatives")
    assert records.images.shape == (5, *plan.data.train.images.shape[1:])
    for trial in plan.trials:
        assert (trial.params["public_records"], trial.params["num_public_negatives"]) == (named, 5)
    assert any(f"Public records of {named}, taken to be public" in note for note in plan.notes)


def test_nothing_is_said_of_public_records_where_there_are_none(make_plan: Plan) -> None:
    plan = make_plan(*QUICK)
    assert plan.data.public_records is None
    assert not any("Public records" in note for note in plan.notes)


def test_public_records_are_neither_trained_nor_scored_on(faces: str, refusal: Callable[..., str]) -> None:
    shares = "shares no record with those trained and scored on; got"
    asked = ("--num-public-negatives", "5", "--dataset", faces)
    assert shares in refusal(*QUICK, *asked, "--public-records", faces)
    for scored in ("--evaluate-on", "--probe-datasets"):
        assert f"{shares} digits" in refusal(*QUICK, *asked, scored, "digits", "--public-records", "digits")


def test_copy_of_the_private_images_is_no_public_source(
    faces: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    images = np.load(tmp_path / "faces.npz")["images"]
    np.savez(tmp_path / "copy.npz", images=images[::-1][:40])
    named = f"npz:{tmp_path / 'copy.npz'}"
    message = refusal(*QUICK, "--dataset", faces, "--public-records", named, "--num-public-negatives", "5")
    assert "public_records must be public; it holds images of the private training data" in message


def test_public_negatives_without_a_source_or_with_too_few_are_refused(
    faces: str, refusal: Callable[..., str]
) -> None:
    assert "give --public-records" in refusal(*QUICK, "--num-public-negatives", "5")
    few = refusal(*QUICK, "--public-records", faces, "--num-public-negatives", "91")
    assert "at most the 90 public records" in few


def test_public_records_are_of_the_kind_that_is_trained_on(refusal: Callable[..., str]) -> None:
    message = refusal(*QUICK, "--public-records", "shapes:200", "--num-public-negatives", "5")
    assert "must be of the kind that is trained on, image or image-text; got image-text for image" in message
    assert "did you mean 'digits'?" in refusal(*QUICK, "--public-records", "digit")


def test_procedural_images_need_no_data_set(faces: str, make_plan: Plan, refusal: Callable[..., str]) -> None:
    asked = ("--public-records", "procedural", "--num-public-negatives", "5")
    plan = make_plan(*QUICK, "--dataset", faces, *asked)
    assert plan.data.public_records is not None
    records = plan.data.public_records.records(5, seed=0, step=0, purpose="negatives")
    assert records.images.shape == (5, *plan.data.train.images.shape[1:])
    assert plan.trials[0].params["public_records"] == "procedural"
    assert any("Procedural images enter the training" in note for note in plan.notes)
    assert "got image for image-text" in refusal(*QUICK, "--dataset", "shapes:300", *asked)


def test_procedural_images_are_named_where_a_source_is_unknown(refusal: Callable[..., str]) -> None:
    for name, hint in (("synthetic", "."), ("proceedural", "; did you mean 'procedural'?")):
        said = refusal("--dataset", "digits", "--public-records", name, "--num-public-negatives", "4")
        assert f"unknown data set '{name}'{hint} Valid: " in said
        assert "parquet:PATH, procedural, shapes" in said


def test_public_pairs_help_pairs(make_plan: Plan) -> None:
    pairs = ("--dataset", "shapes:300", "--group-sizes", "4", "--expected-batch-size", "64")
    plan = make_plan(*QUICK, *pairs, "--public-records", "shapes:200:7", "--num-public-negatives", "5")
    assert plan.data.public_records is not None
    assert len(plan.data.public_records.records(5, seed=0, step=0, purpose="negatives").captions) == 5  # type: ignore[union-attr]
