"""The privacy statement of a sweep: assembled, written as JSON and as a page, and printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpgcl_core.accounting.tuning.cost import TuningCost
from dpgcl_core.accounting.tuning.modes import SEALED_THRESHOLD
from dpgcl_core.durable_files import storage_errors
from dpgcl_core.errors import StorageError
from dpgcl_core.ledger.report import LedgerStatement
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.planning.inputs import earlier_draws
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.sweep_cost import cost_of, open_trials
from sweeps.service.planning.trials import ChargedSteps, Trial, is_proven, trial_class
from sweeps.service.privacy.budget import NO_LEDGER
from sweeps.service.storage.sweep_folder import SweepFolder, is_drawn, replace_text
from trainers.export.sweep_results import ANSWER
from trainers.files.checkpoint import read_grant

STATEMENT = "privacy_statement"


def count_draws(
    plan: SweepPlan, folder: SweepFolder, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, ChargedSteps]:
    """Return upper bounds on the draws of each begun trial, in an open sweep and its earlier sweeps."""
    bounds = {t.name: count_draws_of(t, folder, results.get(t.name)) for t in plan.trials}
    return earlier_draws(plan.earlier) | {name: draws for name, draws in bounds.items() if draws is not None}


def count_draws_of(
    trial: Trial, folder: SweepFolder, result: Mapping[str, Any] | None
) -> ChargedSteps | None:
    """Return upper bounds on the draws of a trial; None if it has not begun.

    For attempts without traces only a bound on their steps is known. Each of these steps may have been a
    first step. Their scorings are at most the larger of two numbers: their starts, and the whole trainings
    that their steps make up. A training that was ended early counts as if it had made all steps
    (`steps_left_out`).
    """
    path, planned = folder.checkpoint_folder(trial.name), trial.config.mechanism.num_steps
    attempts, grant, starts = folder.read_counts(trial.name), read_grant(path), folder.starts(trial.name)
    num_lost_by_grant = grant.num_steps_lost if grant is not None else 0
    num_lost = max(num_lost_by_grant, starts.num_lost * planned)
    if result is not None:
        num_steps = int(result["metrics"]["num_steps_charged"]) + steps_left_out(trial, result["metrics"])
        num_restarts = max(0, num_steps - planned) if attempts is None else attempts.num_attempts - 1
    elif attempts is not None:
        num_steps, num_restarts = attempts.num_steps, attempts.num_attempts - 1
    elif num_lost:  # if the grant names lost steps, another attempt may have begun after them
        num_steps, num_restarts = planned if num_lost_by_grant else 0, 0
    else:
        return None
    num_scorings = max(1, attempts.num_scorings) if attempts is not None else 1 + num_restarts
    return ChargedSteps(
        num_steps=num_steps + num_lost,
        num_first_steps=min(num_steps + num_lost, 1 + num_restarts + num_lost),
        num_scorings=num_scorings + max(starts.num_lost, num_lost // max(1, planned)),
    )


def steps_left_out(trial: Trial, metrics: Mapping[str, float]) -> int:
    """Return the number of planned steps that a finished training left out because its scores ended it.

    Every ε counts them in addition to the drawn steps. Scores chose the step s at which a training ended. So
    its number of steps s + r, with r steps repeated for restarts, depends on the private data, and an ε of
    s + r steps is no guarantee. Whatever the scores, it would have made at most T + r steps (T is the planned
    number), and all that it released is a function of T + r steps. If R steps for restarts are charged in
    advance, its metrics already have the number T + R, which includes the steps left out.
    """
    if trial.config.mechanism.num_restart_steps is not None or "num_steps_done" not in metrics:
        return 0
    return max(0, trial.config.mechanism.num_steps - int(metrics["num_steps_done"]))


def cost_charged(plan: SweepPlan, draws: Mapping[str, ChargedSteps]) -> TuningCost | None:
    """Return an open sweep's cost: as planned, or with all draws if a trial drew more than planned."""
    proven = filter(is_proven, plan.charged_trials)
    if all(trial_class(trial, draws.get(trial.name)) == trial_class(trial) for trial in proven):
        return plan.cost
    return cost_of(plan.release, plan.charged_trials, draws)


def build_statement(
    plan: SweepPlan,
    sweep: str,
    *,
    draws: Mapping[str, ChargedSteps] | None = None,
    ledger: LedgerStatement | None = None,
) -> PrivacyStatement:
    """Return the privacy statement of a sweep.

    Args:
      plan: the sweep's plan; for a sealed sweep it has the candidates.
      sweep: the sweep's name.
      draws: upper bounds on the draws of each trial that has begun, by name; only for an open sweep.
      ledger: the ledger's lines; None without a ledger.
    """
    source, is_open = plan.source, plan.release.is_open
    draws = draws or {}
    proven = [trial for trial in plan.charged_trials if is_proven(trial)]
    return PrivacyStatement(
        sweep=sweep,
        dataset=source.dataset,
        data_are_private=source.are_private,
        guarantee_label=_weakest_label(plan),
        num_records_public=plan.num_records_public,
        num_records_source=str(plan.trials[0].params["num_records_public_source"]),
        mode=plan.release.mode,
        cost=cost_charged(plan, draws) if is_open else plan.cost,
        budget=plan.cost,
        mechanisms=list(dict.fromkeys(trial.config.mechanism for trial in proven)),
        randomness="; ".join(dict.fromkeys(str(trial.params["randomness"]) for trial in plan.trials)),
        scores=_score_text(plan),
        unit_column=source.unit_column,
        row=plan.row,
        starts=tuple(dict.fromkeys(start.sweep for start in plan.private_starts.values())),
        trials=open_trials(plan.charged_trials, draws, len(draws)) if is_open else None,
        ledger=ledger,
        ledger_note=NO_LEDGER if source.are_private else "no ledger: public data need none",
        notes=plan.notes,
    )


def _weakest_label(plan: SweepPlan) -> str:
    labels = {trial.config.guarantee_label for trial in plan.charged_trials}
    return next(label for label in ("none", "as-published", "proven") if label in labels)


def _score_text(plan: SweepPlan) -> str:
    """Return a sentence on the data that scores are computed on, their noise, and the selection by them."""
    source, release = plan.source, plan.release
    probes = ", ".join(source.probe_datasets)
    if plan.data.queries is None:
        return f"on {probes} (public data), without noise" if probes else "none were computed"
    scored_data = source.evaluate_on or f"the held-out part of {source.dataset}"
    kind = "public data" if plan.data.evaluation_is_public else "no public data"
    selection = "" if release.is_open else f"; selection by {release.select_by}"
    if release.mode == SEALED_THRESHOLD:
        selection += f", at least {release.min_score:g}"
    probes_text = f"; features are also scored on {probes} (public data)" if probes else ""
    return f"on {scored_data} ({kind}), without noise{probes_text}{_noised_text(plan)}{selection}"


def _noised_text(plan: SweepPlan) -> str:
    """Return the text on noised scores of private records; empty if there are none."""
    noises = {trial.config.evaluation.score_noise_multiplier for trial in plan.trials} - {None}
    if not noises:
        return ""
    deviations = ", ".join(f"{noise:g}" for noise in sorted(noise for noise in noises if noise is not None))
    share = plan.trials[0].config.evaluation.score_on_held_out
    return (
        f"; and on {share:.3g} of the private records' slots, on which no trial trains, "
        f"as counts with Gaussian noise of standard deviation {deviations}, charged in ε"
    )


def write_statement(statement: PrivacyStatement, folder: Path) -> tuple[Path, Path]:
    """Write `privacy_statement.json` and `.md`, replacing earlier files; return their paths.

    Raises:
      StorageError: they cannot be written, on a full disk for example; then neither file exists.
    """
    paths = folder / f"{STATEMENT}.json", folder / f"{STATEMENT}.md"
    try:
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path, text in zip(paths, (statement.to_json(), statement.to_markdown()), strict=True):
                replace_text(path, text)
    except StorageError:
        withdraw_statement(folder)
        raise
    return paths


def withdraw_statement(folder: Path, question: str | None = None) -> None:
    """Remove all files that state the sweep's cost before more is drawn; the stated cost would be too low.

    These are the statement, the answer, and the figure and tables that are named after `question`.
    """
    figure_files = () if question is None else folder.glob(f"{question.replace('-', '_')}.*")
    figures = [path for path in figure_files if is_drawn(path.name) and path.is_file()]
    for path in (*folder.glob(f"{STATEMENT}.*"), *folder.glob(ANSWER), *figures):
        path.unlink()


def statement_text(statement: PrivacyStatement) -> str:
    """Return the statement's first lines for the terminal."""
    lines = [f"privacy: {statement.headline()}"]
    has_cost = statement.data_are_private or statement.ledger is not None
    line_names = ("ε", "Ledger") if has_cost and statement.cost is not None else ()
    lines += [f"  {name}: {value}" for name, value in statement.lines() if name.startswith(line_names)]
    return "\n".join(lines)
