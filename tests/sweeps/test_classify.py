"""Classifiers of private labels: their sweep, and an encoder of the same records whose ε the ledger adds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dpgcl_core.errors import ConfigError, LedgerError, StorageError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps import classify
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Point
from sweeps.service.privacy.ledger_choice import check_starts
from sweeps.service.privacy.sweep_statement import build_statement
from tests.sweeps.support import plan_of, run_script, train_here, write_npz
from tests.trainers.data.test_data import encoded, noise, write_parquet
from tests.trainers.exporting import write_small_model
from trainers.config.networks import ClassifierConfig
from trainers.export.trial import main as export
from trainers.training.warm_start import read_warm_start, warm_start_note

SMALL = ("--network", "tiny_cnn", "--embedding-dim", "8", "--num-classes", "3", "--num-steps", "2")
SMALL += ("--expected-batch-size", "32", "--no-also-untrained")


def options(*arguments: str) -> classify.ClassifyOptions:
    return parse_options(classify.ClassifyOptions, description="", arguments=arguments)


@pytest.fixture
def encoder(tmp_path: Path, ledger: Ledger) -> Path:
    """An exported model of private data that were charged as `scans`."""
    folder = tmp_path / "encoder"
    write_small_model(folder, data="private")
    _state(folder, ledger=json.loads(ledger.statement("scans").to_json()))
    return folder


def _state(folder: Path, **values: object) -> None:
    path = folder / "privacy_statement.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def planned(encoder: Path, ledger: Ledger, tmp_path: Path) -> SweepPlan:
    """The plan of a head on that encoder, for private data that are charged as `scans`."""
    own = write_npz(tmp_path / "own.npz", 120)
    given = ("--dataset", own, "--evaluate-on", "digits", "--num-records-public", "120", *SMALL)
    given += ("--ledger", str(tmp_path / "ledger.db"), "--dataset-id", "scans", "--warm-start", str(encoder))
    chosen = options(*given, "--repeats", "1")
    point = Point(label="head", changes={"epsilon": None, "noise_multiplier": 4.0})
    return plan_of("classify", chosen, [point])


def test_points_are_every_layers_at_every_epsilon_and_without_privacy() -> None:
    chosen = options("--dataset", "digits", "--epsilons", "1", "3")
    assert (chosen.mechanism.method, chosen.objective.num_augmentations) == ("dp_classifier", 0)
    assert [point.label for point in classify.points(chosen)] == [
        *("head-eps1", "head-eps3", "head-eps-inf", "all-eps1", "all-eps3", "all-eps-inf")
    ]
    assert classify.points(chosen)[3].changes == {"trained_layers": "all", "epsilon": 1.0}


def test_sealed_sweep_selects_by_the_classifiers_accuracy_unless_told() -> None:
    sealed = ("--release", "sealed", "--layers", "head", "--epsilons", "3")
    assert options(*sealed).release.select_by == "classifier_accuracy"
    assert options(*sealed, "--select-by", "knn_accuracy").release.select_by == "knn_accuracy"


def test_another_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="--method must be dp_classifier; got dp_gcl"):
        options("--method", "dp_gcl")


def test_missing_labels_are_named_with_the_columns_there_are(tmp_path: Path) -> None:
    images = [encoded(noise(8, 8, seed=seed)) for seed in range(60)]
    name = write_parquet(tmp_path, image=images, patient=list(range(60)), cls=list(range(60)))
    chosen = options("--dataset", name, "--no-ledger", *SMALL)
    with pytest.raises(ConfigError, match="Add a column named `label`; found cls, image, patient"):
        plan_of("classify", chosen, [Point(label="head", changes={"epsilon": 3.0})])


def test_private_encoder_is_started_from_where_the_same_data_set_is_charged(
    planned: SweepPlan, encoder: Path, ledger: Ledger
) -> None:
    (trial,) = planned.trials
    start = trial.config.warm_start
    assert isinstance(trial.config.network, ClassifierConfig)
    assert start is not None
    assert start.private is not None
    assert start.private.head == ledger.statement("scans").head
    assert planned.private_starts == {encoder / "model.safetensors": start.private}
    check_starts(planned.private_starts, ledger)
    note = warm_start_note(trial.config)
    assert note in planned.notes
    assert "The ε of this sweep does not include the ε of sweep one, which used the same records" in str(note)


def test_statement_says_that_the_encoders_epsilon_comes_on_top(planned: SweepPlan, ledger: Ledger) -> None:
    statement = build_statement(planned, "head", ledger=ledger.statement("scans"))
    assert statement.starts == ("one",)
    assert "on top of the cost of sweep one, whose model it starts from" in statement.headline()
    assert dict(statement.lines())["One record"].startswith("one image with its label;")


@pytest.mark.parametrize("charged_to", [None, "others"])
def test_private_encoder_is_refused_where_another_data_set_or_none_is_charged(
    encoder: Path, charged_to: str | None
) -> None:
    with pytest.raises(ConfigError, match="charge both trainings to one data set of one ledger"):
        read_warm_start(encoder, charged_to=charged_to)


def test_private_encoder_without_a_statement_of_its_own_is_refused(encoder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(encoder / "model.safetensors", alone)
    with pytest.raises(ConfigError, match="pass the exported model's whole folder"):
        read_warm_start(alone, charged_to="scans")
    _state(encoder, model={"sha256": "0" * 64})
    with pytest.raises(ConfigError, match="pass the exported model's whole folder"):
        read_warm_start(encoder, charged_to="scans")
    _state(encoder, ledger=None)
    with pytest.raises(ConfigError, match="pass the exported model's whole folder"):
        read_warm_start(encoder, charged_to="scans")


@pytest.mark.parametrize("way", ["beside", "torch", "linked", "linked by its name"])
def test_model_that_nobody_charged_has_no_part_in_the_statement_beside_it(
    encoder: Path, tmp_path: Path, way: str
) -> None:
    """The statement is of the exported file alone, and another one may be a model of any private data."""
    uncharged = tmp_path / "uncharged"
    write_small_model(uncharged, data="private")
    weights = uncharged / "model.safetensors"
    tensors = {name: value + 1 for name, value in load_file(weights).items()}
    save_file(tensors, weights, metadata={"note": json.dumps({"data": "private"})})
    given = {
        "beside": encoder / "a.safetensors",
        "torch": encoder / "a.pt",
        "linked": tmp_path / "copied" / "x.safetensors",
        "linked by its name": tmp_path / "copied" / "model.safetensors",
    }[way]
    if way.startswith("linked"):
        given.parent.mkdir()
        for name in ("model.json", "privacy_statement.json"):
            shutil.copy(encoder / name, given.parent)
        given.symlink_to(weights)
    elif way == "torch":
        torch.save(tensors, given)
    else:
        shutil.copy(weights, given)
    with pytest.raises((ConfigError, StorageError)):
        read_warm_start(given, charged_to="scans")


def test_private_encoder_that_another_ledger_paid_is_refused(planned: SweepPlan, tmp_path: Path) -> None:
    other = Ledger.create(str(tmp_path / "other.db"))
    other.register("scans", Cap(epsilon=8.0, delta=1e-5), num_records_public=10_000)
    with pytest.raises(LedgerError, match=r"the privacy statement next to .*model\.safetensors"):
        check_starts(planned.private_starts, other)
    with pytest.raises(LedgerError, match="pass the --ledger that it was charged to"):
        check_starts(planned.private_starts, None)


@pytest.mark.ci
def test_encoder_and_head_are_charged_to_one_budget(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweep, export, classify, export: the ledger holds both, and every paper says which ε is whose."""
    train_here(monkeypatch)
    storage = tmp_path / "storage"
    storage.mkdir()
    shutil.copy(empty_database, storage / "mlflow.db")
    own, public = write_npz(tmp_path / "own.npz", 120), _public(tmp_path / "public.npz")
    book = Ledger.create(str(tmp_path / "ledger.db"))
    book.register("scans", Cap(epsilon=30.0, delta=1e-5), num_records_public=120)
    shared = ("--dataset", own, "--evaluate-on", public, "--ledger", str(tmp_path / "ledger.db"))
    shared += ("--dataset-id", "scans", "--storage", str(storage), "--repeats", "1", "--no-references")
    small = [each for each in SMALL if each not in ("--num-classes", "3")]
    code, *said = run_script("privacy_budget", *shared, *small, "--epsilons", "4", "--name", "encoder")
    assert code == 0, said
    where = ("--storage", str(storage), "--sweep")
    assert export([*where, "encoder", "--to", str(tmp_path / "encoder")]) == 0
    of_encoder = book.read_charges("scans", with_pld=False)
    head = ("--epsilons", "2", "--layers", "head", "--warm-start", str(tmp_path / "encoder"))
    code, *said = run_script("classify", *shared, *SMALL, *head, "--name", "head")
    assert code == 0, said
    of_both = book.read_charges("scans", with_pld=False)
    assert (of_encoder.num_settled, of_both.num_settled) == (1, 2)
    assert of_both.epsilon_filter > of_encoder.epsilon_filter
    assert export([*where, "head", "--to", str(tmp_path / "head")]) == 0
    promise = json.loads((tmp_path / "head" / "model.json").read_text())["promise"]
    assert "It starts from the model of sweep encoder, which was trained on the same records" in promise
    assert "ε = 30.0000" in promise


def _public(path: Path) -> str:
    images = np.random.default_rng(3).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(60) % 3)
    return f"npz:{path}"


@pytest.mark.ci
def test_sealed_head_is_selected_by_its_accuracy(tmp_path: Path) -> None:
    chosen = options(*SMALL, "--num-classes", "10", "--release", "sealed")
    plan = plan_of("classify", chosen, classify.points(chosen), calibration_folder=tmp_path)
    assert plan.release.select_by == "classifier_accuracy"
    assert {trial.config.guarantee_label for trial in plan.trials} == {"proven"}


@pytest.mark.ci
def test_classifier_is_scored_on_labels_of_the_same_list_alone(tmp_path: Path) -> None:
    """Text labels are numbered by each data set's own list of classes."""

    def named(file: str, names: tuple[str, ...]) -> str:
        random = np.random.default_rng(len(names))
        images = random.integers(0, 256, (60, 8, 8), dtype=np.uint8)
        np.savez(
            tmp_path / file, images=images, labels=np.array([names[row % len(names)] for row in range(60)])
        )
        return f"npz:{tmp_path / file}"

    own, same = named("own.npz", ("cat", "dog")), named("same.npz", ("cat", "dog"))
    small = [each for each in SMALL if each not in ("--num-classes", "3")]
    given = ("--dataset", own, "--data-is", "public", *small, "--evaluate-on")
    plan = plan_of("classify", options(*given, same), [Point(label="one", changes={})])
    assert isinstance(plan.trials[0].config.network, ClassifierConfig)
    assert plan.trials[0].config.network.num_classes == 2
    for others in (("bird", "cat", "dog"), ("dog", "eel")):
        chosen = options(*given, named("others.npz", others))
        with pytest.raises(ConfigError, match="must be trained and scored on one list of classes"):
            plan_of("classify", chosen, [Point(label="one", changes={})])
