"""Exporting a model: the released weights, with the ε of the training and of the sweep, and nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.release.statement import RESEARCH, epsilon_text
from tests.sweeps.support import write_npz
from tests.trainers.exporting import run_small_sweep, same_weights, stop_small_sweep
from trainers.export.card import model_card
from trainers.export.description import read_description
from trainers.export.export_folder import Statement, load_encoder, write_model
from trainers.export.sweep_results import (
    ANSWER,
    FinishedSweep,
    FinishedTrial,
    TakenSetting,
    read_sweep,
    released_state,
)
from trainers.export.trial import choose_trial, main
from trainers.files.checkpoint import CheckpointFolder, Grant, write_grant
from trainers.files.weights import read_note, read_weights
from trainers.models.encoder import Encoder

PRIVATE, BARE = "S4-Na1-private-r0", "S4-Na1-eps-inf-r0"


@dataclass
class Sweeps:
    """A storage folder with the sweeps `open`, `scans` (private data) and `sealed`."""

    root: Path
    trained: dict[str, dict[str, Encoder]]

    def export(self, *arguments: str, to: Path) -> Path:
        assert main(["--storage", str(self.root), "--to", str(to), *arguments]) == 0
        return to


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Sweeps:
    root = tmp_path_factory.mktemp("storage")
    scans = write_npz(root / "scans.npz", 400)
    trained = {
        "open": run_small_sweep(root, "open", "--ema-decay", "0.5"),
        "scans": run_small_sweep(
            root,
            "scans",
            "--dataset",
            scans,
            "--evaluate-on",
            "digits",
            "--no-ledger",
            "--group-sizes",
            "2",
            "4",
        ),
        "sealed": run_small_sweep(root, "sealed", "--release", "sealed", num_sealed=3),
    }
    return Sweeps(root, trained)


@pytest.fixture
def copied(sweeps: Sweeps, tmp_path: Path) -> Sweeps:
    """The same, to break."""
    shutil.copytree(sweeps.root / "sweeps", tmp_path / "a" / "sweeps")
    return Sweeps(tmp_path / "a", sweeps.trained)


def _trial(name: str, label: str = "proven", **metrics: float) -> FinishedTrial:
    params = {"guarantee_label": label}
    return FinishedTrial(name=name, params=params, metrics=metrics, attempts_lost=False, file=Path(name))


def _sweep(*trials: FinishedTrial, is_sealed: bool = False) -> FinishedSweep:
    return FinishedSweep(
        name="one", is_sealed=is_sealed, statement=Statement(values={}, page=""), trials=tuple(trials)
    )


def _everything(folder: Path) -> str:
    return "".join(path.read_bytes().decode("latin-1") for path in sorted(folder.iterdir()))


@pytest.mark.ci
def test_exported_weights_are_those_that_were_trained(sweeps: Sweeps, tmp_path: Path) -> None:
    folder = sweeps.export("--sweep", "scans", "--trial", PRIVATE, to=tmp_path / "m")
    encoder, _ = load_encoder(folder)
    assert same_weights(encoder.state_dict(), sweeps.trained["scans"][PRIVATE])


@pytest.mark.ci
def test_averaged_training_exports_the_average_that_was_scored(sweeps: Sweeps, tmp_path: Path) -> None:
    folder = sweeps.export("--sweep", "open", "--trial", PRIVATE, to=tmp_path / "m")
    encoder, description = load_encoder(folder)
    assert same_weights(encoder.state_dict(), sweeps.trained["open"][PRIVATE])
    saved = CheckpointFolder(sweeps.root / f"sweeps/open/checkpoints/{PRIVATE}", every_steps=1).load()
    assert saved is not None
    assert not all(torch.equal(saved.model[name], value) for name, value in encoder.state_dict().items())
    assert description.averaged


def test_average_that_a_method_regresses_onto_is_not_exported(sweeps: Sweeps) -> None:
    saved = CheckpointFolder(sweeps.root / f"sweeps/open/checkpoints/{PRIVATE}", every_steps=1).load()
    assert saved is not None
    assert released_state(saved, averaged=False) is saved.model
    with pytest.raises(StorageError, match="average"):
        released_state(replace(saved, average=None), averaged=True)


def test_description_keeps_the_epsilon_of_training_and_sweep_apart(sweeps: Sweeps, tmp_path: Path) -> None:
    found = read_description(sweeps.export("--sweep", "scans", to=tmp_path / "m"))
    statement = json.loads((sweeps.root / "sweeps/scans/privacy_statement.json").read_text())
    result = json.loads((sweeps.root / f"sweeps/scans/trials/{found.trial}.json").read_text())
    assert found.epsilon == result["metrics"]["epsilon"]
    assert found.sweep_epsilon == statement["cost"]["tuned_epsilon"]
    assert found.epsilon < found.sweep_epsilon  # two trainings were released
    assert (found.data, found.guarantee_label) == ("private", "proven")


def test_promise_of_a_chosen_model_states_the_sweeps_epsilon(sweeps: Sweeps, tmp_path: Path) -> None:
    found = read_description(sweeps.export("--sweep", "scans", to=tmp_path / "m"))
    assert found.sweep_epsilon is not None
    assert f"including this model and its selection: ε = {epsilon_text(found.sweep_epsilon)}" in found.promise


def test_promise_of_a_search_from_earlier_sweeps_has_the_condition_of_its_epsilon(
    copied: Sweeps, tmp_path: Path
) -> None:
    file = copied.root / "sweeps/scans/privacy_statement.json"
    statement = json.loads(file.read_text()) | {"earlier": ["first"], "headline": "All, if it is so."}
    file.write_text(json.dumps(statement))
    promise = read_description(copied.export("--sweep", "scans", to=tmp_path / "m")).promise
    assert "Of the sweep: All, if it is so. " in promise
    assert "All releases of the sweep together" not in promise


def test_statement_begins_with_the_model_and_goes_on_as_the_sweeps(sweeps: Sweeps, tmp_path: Path) -> None:
    folder = sweeps.export("--sweep", "scans", to=tmp_path / "m")
    promise = read_description(folder).promise
    page, own = ((f / "privacy_statement.md").read_text() for f in (folder, sweeps.root / "sweeps/scans"))
    assert page == f"**{promise}**\n\n{own}"
    values, own_values = (
        json.loads((f / "privacy_statement.json").read_text()) for f in (folder, sweeps.root / "sweeps/scans")
    )
    assert next(iter(values)) == "model"
    assert {name: value for name, value in values.items() if name != "model"} == own_values


def test_lost_attempts_leave_a_training_the_epsilon_of_the_sweep(copied: Sweeps, tmp_path: Path) -> None:
    write_grant(copied.root / f"sweeps/scans/checkpoints/{PRIVATE}", Grant(num_steps=4, num_steps_lost=2))
    found = read_description(copied.export("--sweep", "scans", "--trial", PRIVATE, to=tmp_path / "m"))
    assert found.epsilon == found.sweep_epsilon


def test_starts_without_a_trace_count_as_lost_attempts(copied: Sweeps) -> None:
    path = copied.root / f"sweeps/scans/started/{PRIVATE}.json"
    assert not any(trial.attempts_lost for trial in read_sweep(copied.root, "scans").trials)
    path.write_text(json.dumps({"num_starts": 2, "num_lost": 1}))
    lost = {trial.name for trial in read_sweep(copied.root, "scans").trials if trial.attempts_lost}
    assert lost == {PRIVATE}


def test_best_is_sought_among_the_trials_with_a_guarantee() -> None:
    trials = (
        _trial("a", knn_accuracy=0.5),
        _trial("b", knn_accuracy=0.6),
        _trial("c", "none", knn_accuracy=0.9),
    )
    chosen, how = choose_trial(_sweep(*trials))
    assert chosen.name == "b"
    assert "trials with a guarantee and this score" in how


def test_best_is_sought_among_all_where_none_has_a_guarantee() -> None:
    trials = _trial("a", "none", knn_accuracy=0.5), _trial("c", "none", knn_accuracy=0.9)
    assert choose_trial(_sweep(*trials))[0].name == "c"


def test_best_goes_by_the_score_asked_for() -> None:
    trials = (
        _trial("a", knn_accuracy=0.5, linear_probe_accuracy=0.9),
        _trial("b", knn_accuracy=0.6, linear_probe_accuracy=0.1),
    )
    assert choose_trial(_sweep(*trials), best="linear_probe_accuracy")[0].name == "a"


def test_untrained_network_is_never_the_best() -> None:
    trials = _trial("a", "none", knn_accuracy=0.5), _trial("b", "none", knn_accuracy=0.9, num_steps_done=0)
    assert choose_trial(_sweep(*trials))[0].name == "a"
    with pytest.raises(ConfigError, match="untrained network"):
        trials[1].state()


def test_best_may_go_by_a_score_on_a_probing_data_set() -> None:
    name = "transfer_knn_accuracy/eurosat"
    trials = _trial("a", **{name: 0.5, "knn_accuracy": 0.9}), _trial("b", **{name: 0.6, "knn_accuracy": 0.1})
    assert choose_trial(_sweep(*trials), best=name)[0].name == "b"


@pytest.mark.parametrize("score", ["epsilon", "train_loss", "untrained_knn_accuracy", "accuracy"])
def test_best_is_refused_by_what_is_no_score_of_the_trained_network(score: str) -> None:
    with pytest.raises(ConfigError, match="unknown score of the trials of one"):
        choose_trial(_sweep(_trial("a", knn_accuracy=0.5)), best=score)


def test_sweep_without_scores_asks_for_a_trial_by_name() -> None:
    with pytest.raises(ConfigError, match="--trial to one of a, b"):
        choose_trial(_sweep(_trial("a"), _trial("b")))


def test_unknown_trial_lists_the_known_ones(sweeps: Sweeps) -> None:
    with pytest.raises(ConfigError, match=f"Valid: {BARE}, {PRIVATE}"):
        main(["--storage", str(sweeps.root), "--sweep", "open", "--trial", "S4"])


def test_model_without_a_guarantee_is_exported_loudly(
    sweeps: Sweeps, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweeps.export("--sweep", "open", "--trial", BARE, to=tmp_path / "m")
    assert capsys.readouterr().out.startswith("NO PRIVACY GUARANTEE")
    found = read_description(folder)
    assert (found.guarantee_label, found.epsilon, found.delta, found.sweep_epsilon) == ("none", *[None] * 3)
    assert (folder / "privacy_statement.md").read_text().startswith("**NO PRIVACY GUARANTEE")


def test_sealed_sweep_exports_what_it_published(sweeps: Sweeps, tmp_path: Path) -> None:
    encoder, found = load_encoder(sweeps.export("--sweep", "sealed", to=tmp_path / "m"))
    published = read_weights(sweeps.root / "sweeps/sealed/release/model.safetensors").tensors
    assert any(same_weights(published, each) for each in sweeps.trained["sealed"].values())
    assert same_weights(published, encoder)
    statement = json.loads((sweeps.root / "sweeps/sealed/release/privacy_statement.json").read_text())
    assert found.sweep_epsilon == statement["cost"]["tuned_epsilon"]
    assert found.epsilon == statement["cost"]["training_epsilon"]


def test_published_weights_say_that_their_data_are_private_wherever_they_are_copied(sweeps: Sweeps) -> None:
    note = read_note(sweeps.root / "sweeps/sealed/release/model.safetensors")
    statement = json.loads((sweeps.root / "sweeps/sealed/release/privacy_statement.json").read_text())
    assert json.loads(str(note))["data"] == statement["data"]


def test_sealed_export_does_not_tell_which_trial_it_was(sweeps: Sweeps, tmp_path: Path) -> None:
    folder = sweeps.export("--sweep", "sealed", to=tmp_path / "m")
    assert read_description(folder).trial is None
    assert not any(name in _everything(folder) for name in sweeps.trained["sealed"])


@pytest.mark.parametrize("option", [("--trial", "draw-0"), ("--best", "knn_accuracy")])
def test_sealed_sweep_refuses_to_export_by_choice(sweeps: Sweeps, option: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="nothing else of it may be exported"):
        main(["--storage", str(sweeps.root), "--sweep", "sealed", *option])


def test_trusted_side_of_a_sealed_sweep_is_no_sweep(copied: Sweeps) -> None:
    for name in ("plan.json", "privacy_statement.json", "privacy_statement.md"):
        shutil.copy(copied.root / "sweeps/open" / name, copied.root / "sweeps/sealed/trusted" / name)
    with pytest.raises(StorageError, match="unknown sweep"):
        main(["--storage", str(copied.root), "--sweep", "sealed/trusted"])


def test_sealed_sweep_that_published_nothing_has_nothing_to_export(copied: Sweeps) -> None:
    (copied.root / "sweeps/sealed/release/model.safetensors").unlink()
    with pytest.raises(StorageError, match="published no model"):
        main(["--storage", str(copied.root), "--sweep", "sealed"])


def test_unknown_sweep_lists_the_known_ones(sweeps: Sweeps) -> None:
    with pytest.raises(StorageError, match="Valid: open, scans, sealed"):
        main(["--storage", str(sweeps.root), "--sweep", "opne"])


def test_sweep_without_a_statement_says_how_to_get_it(copied: Sweeps) -> None:
    (copied.root / "sweeps/scans/privacy_statement.md").unlink()
    with pytest.raises(StorageError, match="--resume --name scans"):
        main(["--storage", str(copied.root), "--sweep", "scans"])


def test_statement_is_withdrawn_before_more_is_drawn(copied: Sweeps) -> None:
    (copied.root / f"sweeps/open/trials/{PRIVATE}.json").unlink()
    stop_small_sweep(copied.root, "open", "--ema-decay", "0.5", "--resume")
    with pytest.raises(StorageError, match="--resume --name open"):
        main(["--storage", str(copied.root), "--sweep", "open"])


def test_result_of_an_earlier_version_is_refused(copied: Sweeps) -> None:
    path = copied.root / f"sweeps/scans/trials/{PRIVATE}.json"
    result = json.loads(path.read_text())
    del result["params"]
    path.write_text(json.dumps(result))
    with pytest.raises(StorageError, match="earlier version"):
        main(["--storage", str(copied.root), "--sweep", "scans"])


def test_checkpoint_of_another_step_is_refused(copied: Sweeps) -> None:
    folder = CheckpointFolder(copied.root / f"sweeps/scans/checkpoints/{PRIVATE}", every_steps=1)
    saved = folder.load()
    assert saved is not None
    folder.save(replace(saved, step=1))
    with pytest.raises(StorageError, match="after step 2; got step 1"):
        main(["--storage", str(copied.root), "--sweep", "scans", "--trial", PRIVATE])


def test_lost_checkpoint_is_refused(copied: Sweeps) -> None:
    (copied.root / f"sweeps/scans/checkpoints/{PRIVATE}/checkpoint.pt").unlink()
    with pytest.raises(StorageError, match="is missing"):
        main(["--storage", str(copied.root), "--sweep", "scans", "--trial", PRIVATE])


def test_existing_folder_is_never_overwritten(sweeps: Sweeps, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(StorageError, match="never overwritten"):
        sweeps.export("--sweep", "open", to=tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []


def write_answer(folder: Path, over: dict[str, Any] | None, trials: list[str]) -> None:
    setting = {"name": "S = 4", "trials": trials, "over_start": over}
    answer = {"score": "knn_accuracy", "choices": [{"take": "S = 4", "settings": [setting]}]}
    (folder / ANSWER).write_text(json.dumps(answer))


def test_median_repeat_of_what_the_answer_takes_is_exported() -> None:
    scores = {"a-r0": 0.9, "a-r1": 0.5, "a-r2": 0.7, "b-r0": 0.99}
    trials = [_trial(name, knn_accuracy=score) for name, score in scores.items()]
    taken = TakenSetting(name="a", score="knn_accuracy", trials=("a-r0", "a-r1", "a-r2"))
    sweep = replace(_sweep(*trials), choices=(taken,))
    chosen, words = choose_trial(sweep)
    assert chosen.name == "a-r2"
    assert words == "a, which the sweep's answer recommends; the median of its repeats by knn_accuracy"
    assert choose_trial(sweep, best="knn_accuracy")[0].name == "b-r0"


def test_answer_at_several_epsilons_leaves_the_choice_to_the_reader() -> None:
    trials = [_trial(name, knn_accuracy=0.5) for name in ("low-r0", "high-r0")]
    taken = tuple(
        TakenSetting(name=name, score="knn_accuracy", trials=(f"{name}-r0",)) for name in ("low", "high")
    )
    with pytest.raises(ConfigError, match=r"--trial .*low-r0 \(low\), high-r0 \(high\)"):
        choose_trial(replace(_sweep(*trials), choices=taken))


@pytest.mark.parametrize(
    ("verdict", "warned"), [("higher", False), ("within noise", True), ("lower", True), (None, False)]
)
def test_export_warns_where_the_gain_of_its_choice_is_not_distinguishable(
    copied: Sweeps, tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: str | None, warned: bool
) -> None:
    over = {"minus": "the untrained network", "mean": 0.002, "verdict": verdict} if verdict else None
    write_answer(copied.root / "sweeps" / "open", over, [PRIVATE])
    copied.export("--sweep", "open", "--trial", PRIVATE, to=tmp_path / "m")
    expected = (
        "warning: S = 4 is not distinguishable above the untrained network (+0.20 points in the sweep's"
    )
    assert (expected in capsys.readouterr().err) == warned


def test_export_of_a_sealed_sweep_warns_by_its_released_answer(
    copied: Sweeps, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = {"minus": "the untrained network", "mean": 0.0, "verdict": "within noise"}
    write_answer(copied.root / "sweeps" / "sealed" / "release", over, [])
    copied.export("--sweep", "sealed", to=tmp_path / "m")
    assert "warning: S = 4 is not distinguishable" in capsys.readouterr().err


def test_damaged_answer_is_none(copied: Sweeps, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied.root / "sweeps" / "open" / ANSWER).write_text(
        '{"score": "knn_accuracy", "choices": [{"settings": [{}]}]}'
    )
    copied.export("--sweep", "open", "--trial", PRIVATE, to=tmp_path / "m")
    assert "warning" not in capsys.readouterr().err


def test_failed_export_leaves_nothing(sweeps: Sweeps, tmp_path: Path) -> None:
    description = read_description(sweeps.export("--sweep", "open", to=tmp_path / "m"))
    state: dict[str, Any] = {"backbone.extra": "text"}
    with pytest.raises(StorageError, match="tensors by name"):
        write_model(tmp_path / "n", description, state, Statement(values={}, page=""))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_default_folder_lies_in_the_storage_folder(copied: Sweeps) -> None:
    assert main(["--storage", str(copied.root), "--sweep", "open", "--trial", PRIVATE]) == 0
    assert read_description(copied.root / f"exported/open-{PRIVATE}").data == RESEARCH


def test_changed_weights_are_not_loaded(sweeps: Sweeps, tmp_path: Path) -> None:
    folder = sweeps.export("--sweep", "open", to=tmp_path / "m")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(StorageError, match="is not the exported file"):
        load_encoder(folder)


def test_network_of_the_users_own_is_imported_only_when_named(sweeps: Sweeps, tmp_path: Path) -> None:
    folder = sweeps.export("--sweep", "open", to=tmp_path / "m")
    path = folder / "model.json"
    path.write_text(path.read_text().replace('"tiny_cnn"', '"trainers.models.small_cnn:tiny_cnn"'))
    with pytest.raises(ConfigError, match="If you trust this network"):
        load_encoder(folder)
    assert load_encoder(folder, own_network="trainers.models.small_cnn:tiny_cnn")[1].embedding_dim == 8


@pytest.mark.parametrize(("old", "new"), [('"format": 1', '"format": 2'), ("image_encoder", "text_encoder")])
def test_unknown_format_or_kind_is_refused(sweeps: Sweeps, tmp_path: Path, old: str, new: str) -> None:
    path = sweeps.export("--sweep", "open", to=tmp_path / "m") / "model.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(StorageError, match=r"must have format 1; got|unknown kind"):
        read_description(path.parent)


def test_a_trial_by_name_and_the_best_one_exclude_each_other(sweeps: Sweeps) -> None:
    with pytest.raises(ConfigError, match=r"got --trial S4 and --best knn_accuracy. Leave one out"):
        main(["--sweep", "open", "--storage", str(sweeps.root), "--trial", "S4", "--best", "knn_accuracy"])


def test_model_card_says_what_the_statement_says(sweeps: Sweeps, tmp_path: Path) -> None:
    folder = sweeps.export("--sweep", "scans", to=tmp_path / "m")
    card, about = (folder / "README.md").read_text(), read_description(folder)
    assert about.promise.split(" (")[0] in card
    for value in (about.sweep_epsilon, about.epsilon):
        assert value is not None
        assert epsilon_text(value) in card
    assert about.neighboring_relation in card
    assert "python -m trainers.embed --model FOLDER" in card
    assert str(tmp_path) not in card.partition("| Trained on |")[0]


def test_model_card_of_a_model_without_guarantee_promises_nothing(sweeps: Sweeps, tmp_path: Path) -> None:
    about = replace(
        read_description(sweeps.export("--sweep", "scans", to=tmp_path / "m")), guarantee_label="none"
    )
    assert "There is no (ε, δ) guarantee to rely on" in model_card(about, [])


def test_copies_to_an_address_are_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        main(["--sweep", "open", "--publish-to", "s3://bucket/models"])
    assert "--publish-to was removed in 0.2.0" in str(refused.value)
    assert "aws s3 cp" in str(refused.value)
