"""Export one trained model of a sweep, with its privacy statement, to a new folder.

    python -m trainers.export --sweep NAME --trial NAME
    python -m trainers.export --sweep NAME --best knn_accuracy --to /models/scans
    python -m trainers.export --sweep NAME --register

By default, the setting that the sweep's answer recommends is exported: the repeat with the median score, not
the luckiest one. With `--best`, the model with the highest score is exported, among the trials with a
guarantee if there are any. This choice has a privacy cost. An open sweep releases all its trials, so choosing
among them is post-processing of the whole sweep. The ε that holds for the chosen model, including the choice,
is therefore the ε of the whole sweep. The ε of the training alone is stated next to it, never in its place.
From a sealed sweep, only the published model can be exported, at the ε of the whole sweep.

The folder holds the weights (`model.safetensors`), their description (`model.json`), and the sweep's privacy
statement with a first line about this model. It is never overwritten. A CLIP model's adapters are merged into
its weights, so that open_clip can load them (`open_clip.create_model("local-dir:FOLDER")`). The adapters
alone are in `adapter/`, which peft loads onto the model that the training started from.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgcl_core.command_line import run_command
from dpgcl_core.errors import ConfigError, require_choice
from dpgcl_core.release.metrics import CLASSIFIER_SCORE, is_final_score
from dpgcl_core.release.statement import PROVEN, delta_text, epsilon_text, software_versions
from trainers.config.removed_options import removed_option_line
from trainers.files.storage import storage_root
from trainers.tracking.mlflow_server import database_address

if TYPE_CHECKING:  # only the command loads torch, its help does not
    from trainers.export.description import ModelDescription
    from trainers.export.sweep_results import FinishedSweep, FinishedTrial, TakenSetting

DEFAULT_SCORES = ("image_to_text_recall_at_10", CLASSIFIER_SCORE, "knn_accuracy")
"""Scores by which the best trial is chosen: the first of them that any trial has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0.

    Raises:
      ConfigError: an option is unknown, or as `export_command`.
      StorageError: as `export_command`.
    """
    code: int = run_command(
        export_command,
        prog="python -m trainers.export",
        description=__doc__,
        arguments=arguments,
        removals=removed_option_line,
    )
    return code


def export_command(
    *,
    sweep: str,
    storage: Path | None = None,
    trial: str | None = None,
    best: str | None = None,
    to: Path | None = None,
    register: bool = False,
    registered_name: str | None = None,
    tracking_uri: str | None = None,
) -> int:
    """Write one trained model of a sweep; return 0.

    Args:
      sweep: the sweep's name.
      storage: folder where it was run; $DPGCL_STORAGE or ~/dpgcl-results by default.
      trial: export this trial's model.
      best: export the trial with the best value of this score, instead of the answer's recommendation.
      to: new folder; exported/SWEEP-TRIAL in the storage folder by default.
      register: also add it to MLflow's model registry, with the model card as its description; an existing
        export is registered unchanged.
      registered_name: name of the registered model; dpgcl-SWEEP by default.
      tracking_uri: MLflow server or database that has the sweep; $MLFLOW_TRACKING_URI or the storage
        folder's database by default.

    Raises:
      ConfigError: there is no such trial or score, both are set, or as `write_model`.
      StorageError: as `read_sweep` and `write_model`.
      TrackingError: as `trainers.export.model_registry.register`.
    """
    from trainers.export.description import read_description
    from trainers.export.export_folder import write_model
    from trainers.export.kinds import kind_of
    from trainers.export.sweep_results import read_sweep

    if not register and (registered_name or tracking_uri):
        raise ConfigError(
            "--registered-name and --tracking-uri apply only to --register; got "
            f"{registered_name or tracking_uri}. Add --register, or leave them out."
        )
    if trial is not None and best is not None:
        raise ConfigError(
            f"--trial and --best exclude each other; got --trial {trial} and --best {best}. Leave one out."
        )
    root = storage_root(storage)
    results = read_sweep(root, sweep)
    chosen_trial, choice = choose_trial(results, trial=trial, best=best)
    folder = to or root / "exported" / "-".join(filter(None, (results.name, chosen_trial.name)))
    about = describe(results, chosen_trial, choice)
    written_before = register and _is_export_of(folder, about)
    if written_before:
        description = read_description(folder)
    else:
        description = write_model(folder, about, chosen_trial.state(), results.statement)
    print(description.promise)
    print(f"chosen: {description.choice}")
    if chosen_trial.doubt is not None:
        print(f"warning: {chosen_trial.doubt}", file=sys.stderr)
    print(f"{'already exported' if written_before else 'written'}: {folder}")
    for line in kind_of(chosen_trial.params).usage(folder, description):
        print(line)
    if register:
        _register(folder, tracking_uri or tracking_address(root), registered_name)
    return 0


def tracking_address(root: Path) -> str:
    """Return the default tracking address of the sweeps of a storage folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or database_address(root)


def _register(folder: Path, tracking_uri: str, name: str | None) -> None:
    from trainers.export.model_registry import register as register_model

    entry = register_model(folder, tracking_uri, name)
    print(f"{'registered' if entry.is_new else 'already registered'}: {entry.name}, version {entry.version}")
    print(f'load it: mlflow.pyfunc.load_model("{entry.uri}").predict(images)')


def _is_export_of(folder: Path, about: ModelDescription) -> bool:
    """Whether a folder already holds the export of exactly this model."""
    from trainers.export.description import read_description

    if not folder.exists():
        return False
    exported = read_description(folder)
    return (exported.sweep, exported.trial, exported.promise) == (about.sweep, about.trial, about.promise)


def choose_trial(
    sweep: FinishedSweep, *, trial: str | None = None, best: str | None = None
) -> tuple[FinishedTrial, str]:
    """Return the model to export, and how it was chosen, in words.

    Args:
      sweep: a sweep with at least one model.
      trial: the trial's name.
      best: the score to choose by. Without a name or a score, the choice is the median repeat of the setting
        that the sweep's answer recommends or, without an answer, the best by the first of `DEFAULT_SCORES`.

    Raises:
      ConfigError: there is no such trial or score, either is requested from a sealed sweep, or the answer
        recommends a setting at each of several ε.
    """
    if sweep.is_sealed:
        if trial is not None or best is not None:
            raise ConfigError(
                "a sealed sweep publishes one model, and nothing else of it may be exported; got "
                f"{trial or best}. Leave --trial and --best out."
            )
        return sweep.trials[0], "the one model that the sealed sweep published"
    names = [str(each.name) for each in sweep.trials]
    if trial is not None:
        require_choice(f"trial of {sweep.name}", trial, names)
        return sweep.trials[names.index(trial)], "by name"
    medians = [_median_repeat(sweep, setting) for setting in sweep.choices] if best is None else []
    if len(medians) > 1:
        listed = ", ".join(f"{trial.name} ({setting.name})" for trial, setting in medians)
        raise ConfigError(
            f"the answer of {sweep.name} recommends a setting for each ε. Set --trial to one of their median "
            f"repeats: {listed}"
        )
    if medians:
        (median, setting), *_ = medians
        repeats = f"the median of its repeats by {setting.score}"
        return median, f"{setting.name}, which the sweep's answer recommends; {repeats}"
    return _best_trial(sweep, best, names)


def _median_repeat(sweep: FinishedSweep, setting: TakenSetting) -> tuple[FinishedTrial, TakenSetting]:
    """Return the setting's repeat with the median score (the lower of two middle ones), and the setting."""
    trials = [trial for trial in sweep.trials if trial.name in setting.trials]
    if not trials:
        raise ConfigError(f"the answer of {sweep.name} recommends {setting.name}, which has no trial")
    trials.sort(key=lambda trial: (trial.metrics.get(setting.score, -math.inf), str(trial.name)))
    return trials[(len(trials) - 1) // 2], setting


def _best_trial(sweep: FinishedSweep, score: str | None, names: Sequence[str]) -> tuple[FinishedTrial, str]:
    """Return the best trial by a score, of those with a guarantee if any has one, and the choice in words."""
    trained = [each for each in sweep.trials if each.metrics.get("num_steps_done") != 0]
    proven = [each for each in trained if each.params["guarantee_label"] == PROVEN]
    scores = {name for each in proven or trained for name in each.metrics if is_final_score(name)}
    if not scores:
        raise ConfigError(
            f"no training of {sweep.name} has a score to choose by. Set --trial to one of {', '.join(names)}"
        )
    if score is None:
        score = next((name for name in DEFAULT_SCORES if name in scores), DEFAULT_SCORES[-1])
    require_choice(f"score of the trials of {sweep.name}", score, scores)
    candidates = [each for each in proven or trained if score in each.metrics]
    best = max(candidates, key=lambda trial: trial.metrics[score])
    among = "trials with a guarantee and this score" if proven else "trials with this score"
    return best, f"the best {score}, {best.metrics[score]:.4f}, of {len(candidates)} {among}"


def describe(sweep: FinishedSweep, trial: FinishedTrial, choice: str) -> ModelDescription:
    """Return the content of a model's `model.json`; the hashes are added when the weights are written.

    Raises:
      ConfigError: its CLIP model is unknown to this version.
    """
    from trainers.export.description import ModelDescription
    from trainers.export.kinds import kind_of

    params, statement = trial.params, sweep.statement.values
    kind = kind_of(params)
    figures = _privacy_figures(sweep, trial)
    return ModelDescription(
        promise=_promise(sweep, trial, figures),
        network=params["network_name"],
        kind=kind.name,
        **kind.describe(params),
        sweep=sweep.name,
        trial=trial.name,
        choice=choice,
        method=params["method"],
        dataset=statement["dataset"],
        data=statement["data"],
        guarantee_label=params["guarantee_label"],
        neighboring_relation=params["neighboring_relation"],
        **figures,
        num_steps=params["num_steps"],
        averaged=trial.is_averaged,
        scores={name: value for name, value in trial.metrics.items() if is_final_score(name)},
        warm_start=params["warm_start"],
        versions=software_versions(),
    )


def _privacy_figures(sweep: FinishedSweep, trial: FinishedTrial) -> dict[str, Any]:
    """Return ε and δ of the one training and of the whole sweep; None where none is guaranteed."""
    cost = sweep.statement.values["cost"]
    if trial.params["guarantee_label"] != PROVEN or cost is None:
        return dict.fromkeys(("epsilon", "delta", "sweep_epsilon", "sweep_delta"))
    whole = cost["tuned_epsilon"] if cost["accounted"] else None
    epsilon = cost["training_epsilon"] if sweep.is_sealed else trial.metrics["epsilon"]
    if trial.attempts_lost:  # its own ε omits their steps; that of the whole sweep bounds them, too
        epsilon = whole
    return {
        "epsilon": epsilon,
        "delta": None if epsilon is None else trial.params["target_delta"],
        "sweep_epsilon": whole,
        "sweep_delta": None if whole is None else cost["delta"],
    }


def _promise(sweep: FinishedSweep, trial: FinishedTrial, figures: Mapping[str, Any]) -> str:
    """State the guarantees of the training and of the whole sweep, never one in place of the other."""
    statement, label = sweep.statement.values, trial.params["guarantee_label"]
    place = f"sealed sweep {sweep.name}" if sweep.is_sealed else f"sweep {sweep.name}, trial {trial.name}"
    data = f"{statement['dataset']} ({statement['data']})"
    if label != PROVEN or statement["cost"] is None:
        return f"NO PRIVACY GUARANTEE: this model ({place}) was trained on {data}; label `{label}`."
    if figures["sweep_epsilon"] is None:
        whole = f"not accounted ({statement['cost']['reason']}), so no guarantee covers its selection"
    else:
        whole = _epsilon_delta_text(figures["sweep_epsilon"], figures["sweep_delta"])
    if statement.get("earlier"):  # the ε of the sweep holds under a condition
        together = f"Of the sweep: {statement['headline']}"
    elif statement["guarantee_label"] == PROVEN:
        together = f"All releases of the sweep together, including this model and its selection: {whole}."
    else:
        together = f"All trainings of the sweep with a guarantee, together: {whole}. The others have none."
    return (
        f"This model ({place}) was trained on {data}. "
        f"This training alone: {_epsilon_delta_text(figures['epsilon'], figures['delta'])}. {together} "
        f"{_earlier_model_text(statement)}Neighbouring data sets: {trial.params['neighboring_relation']}"
        f"{_conditions_text(statement)}."
    )


def _earlier_model_text(statement: Mapping[str, Any]) -> str:
    """State the total cost to the same records, if the training starts from a model trained on them."""
    starts, ledger = statement.get("starts") or (), statement.get("ledger")
    if not starts or ledger is None:
        return ""
    return (
        f"It starts from the model of sweep {' and '.join(starts)}, which was trained on the same records. "
        f"Both together, with everything else charged to {ledger['dataset_id']!r} in ledger "
        f"{ledger['head']['ledger_id']}: {_epsilon_delta_text(ledger['epsilon'], ledger['delta'])}. "
    )


def _conditions_text(statement: Mapping[str, Any]) -> str:
    """State the guarantee's further conditions on both neighbouring data sets, as in the statement."""
    conditions = statement.get("conditions") or ()
    return f", among {' and '.join(conditions)}" if conditions else ""


def _epsilon_delta_text(epsilon: float | None, delta: float | None) -> str:
    if epsilon is None or delta is None:
        return "not accounted, because some of its attempts were lost"
    return f"ε = {epsilon_text(epsilon)}, δ = {delta_text(delta)}"
