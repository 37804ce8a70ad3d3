"""The privacy statement of a sweep: put together, written as JSON and as a page, and printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpgcl_core.accounting.tuning.cost import OPEN, TuningCost
from dpgcl_core.ledger.report import LedgerStatement
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.budget import NO_LEDGER
from sweeps.service.plan import SweepPlan, Trial
from sweeps.service.release import Charged, cost_of, is_proven, open_trials, score_text, trial_class
from sweeps.service.storage import SweepFolder
from trainers.data.dataset import modality_of
from trainers.files.checkpoint import read_attempt, read_grant

STATEMENT = "privacy_statement"


def what_was_drawn(
    plan: SweepPlan, folder: SweepFolder, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Charged]:
    """Returns an upper bound on what each begun trial of an open sweep, and of an earlier one, has drawn."""
    drawn = {t.name: what_one_drew(t, folder, results.get(t.name)) for t in plan.trials}
    if plan.earlier is not None:
        drawn |= plan.earlier.drawn
    return {name: charged for name, charged in drawn.items() if charged is not None}


def what_one_drew(trial: Trial, folder: SweepFolder, result: Mapping[str, Any] | None) -> Charged | None:
    """Returns an upper bound on what a trial has drawn; None where it has not begun.

    Of attempts whose traces were lost only the number of steps is known: each of them may have been a first
    one, and as many scorings may have been among them as starts or as whole trainings.
    """
    path, planned = folder.checkpoint_folder(trial.name), trial.config.mechanism.num_steps
    attempt, grant, starts = read_attempt(path), read_grant(path), folder.starts(trial.name)
    lost_by_grant = grant.num_steps_lost if grant is not None else 0
    lost = max(lost_by_grant, starts.num_lost * planned)
    if result is not None:
        metrics = result["metrics"]
        num_steps, num_restarts = int(metrics["num_steps_charged"]), int(metrics.get("num_restarts", 0))
    elif attempt is not None:
        num_steps, num_restarts = planned + attempt.num_steps_repeated, attempt.num_restarts
    elif lost:  # a grant says that another attempt may have begun since
        num_steps, num_restarts = planned if lost_by_grant else 0, 0
    else:
        return None
    num_scorings = max(1, attempt.num_scorings) if attempt is not None else 1 + num_restarts
    return Charged(
        num_steps=num_steps + lost,
        num_first_steps=min(num_steps + lost, 1 + num_restarts + lost),
        num_scorings=num_scorings + max(starts.num_lost, lost // max(1, planned)),
    )


def cost_charged(plan: SweepPlan, drawn: Mapping[str, Charged]) -> TuningCost | None:
    """Returns the cost of an open sweep with what restarts repeated."""
    proven = filter(is_proven, plan.charged_trials)
    if all(trial_class(trial, drawn.get(trial.name)) == trial_class(trial) for trial in proven):
        return plan.cost
    return cost_of(plan.options, plan.charged_trials, drawn)


def build_statement(
    plan: SweepPlan,
    sweep: str,
    *,
    drawn: Mapping[str, Charged] | None = None,
    ledger: LedgerStatement | None = None,
) -> PrivacyStatement:
    """Returns the statement of a sweep.

    Args:
      plan: the sweep's; of a sealed one, its candidates.
      sweep: the sweep's name.
      drawn: what each begun trial may have drawn, for an open sweep.
      ledger: the ledger's lines.
    """
    options = plan.options
    is_open = options.release == OPEN
    charged = drawn or {}
    proven = [trial for trial in plan.charged_trials if is_proven(trial)]
    return PrivacyStatement(
        sweep=sweep,
        dataset=options.dataset,
        data_are_private=options.data_are_private,
        guarantee_label=_weakest_label(plan),
        num_records_public=plan.num_records_public,
        num_records_source=str(plan.trials[0].params["num_records_public_source"]),
        mode=options.release,
        cost=cost_charged(plan, charged) if is_open else plan.cost,
        budget=plan.cost,
        mechanisms=list(dict.fromkeys(trial.config.mechanism for trial in proven)),
        randomness="; ".join(dict.fromkeys(str(trial.params["randomness"]) for trial in plan.trials)),
        scores=score_text(plan),
        unit_column=options.unit_column,
        row="image with all its captions" if modality_of(plan.data.train) == "image-text" else "row",
        trials=open_trials(plan.charged_trials, charged, len(charged)) if is_open else None,
        ledger=ledger,
        ledger_note=NO_LEDGER if options.data_are_private else "no ledger: public data need none",
        notes=plan.notes,
    )


def _weakest_label(plan: SweepPlan) -> str:
    labels = {trial.config.guarantee_label for trial in plan.charged_trials}
    return next(label for label in ("none", "as-published", "proven") if label in labels)


def write_statement(statement: PrivacyStatement, folder: Path) -> tuple[Path, Path]:
    """Writes `privacy_statement.json` and `.md`, in place of earlier ones; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{STATEMENT}.json", folder / f"{STATEMENT}.md"
    for path, text in zip(paths, (statement.to_json(), statement.to_markdown()), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def withdraw_statement(folder: Path) -> None:
    """Takes an earlier statement away before more is drawn: it would promise less than is spent."""
    for path in folder.glob(f"{STATEMENT}.*"):
        path.unlink()


def statement_text(statement: PrivacyStatement) -> str:
    """Returns the statement's first lines for the terminal."""
    cost = statement.cost
    shown = [f"privacy: {statement.headline()}"]
    if cost is not None:
        shown += [
            f"  {name}: {value}" for name, value in statement.lines() if name.startswith(("ε", "Ledger"))
        ]
    return "\n".join(shown)
