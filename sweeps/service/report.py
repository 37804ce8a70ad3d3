"""The privacy statement of a sweep: put together, written as JSON and as a page, and printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpgcl_core.ledger_report import LedgerStatement
from dpgcl_core.selection import OPEN, TuningCost
from dpgcl_core.statement import PrivacyStatement
from sweeps.service.budget import NO_LEDGER
from sweeps.service.plan import SweepPlan
from sweeps.service.release import cost_of, is_proven, open_trials, score_text
from sweeps.service.storage import SweepFolder
from trainers.checkpoint import read_attempt, read_grant

STATEMENT = "privacy_statement"


def steps_charged(
    plan: SweepPlan, folder: SweepFolder, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """Returns an upper bound on the steps that each begun trial of an open sweep has drawn, by name."""
    found = {}
    for trial in plan.trials:
        path = folder.checkpoint_folder(trial.name)
        attempt, grant = read_attempt(path), read_grant(path)
        lost = grant.num_steps_lost if grant is not None else 0
        if trial.name in results:
            found[trial.name] = int(results[trial.name]["metrics"]["num_steps_charged"]) + lost
        elif attempt is not None:
            found[trial.name] = trial.config.mechanism.num_steps + attempt.num_steps_repeated + lost
    return found


def cost_charged(plan: SweepPlan, num_steps: Mapping[str, int]) -> TuningCost | None:
    """Returns the cost of an open sweep with the steps that restarts repeated."""
    if all(num_steps.get(t.name, 0) <= t.config.mechanism.num_steps for t in plan.trials):
        return plan.cost
    return cost_of(plan.options, plan.trials, num_steps)


def build_statement(
    plan: SweepPlan,
    sweep: str,
    *,
    num_steps: Mapping[str, int] | None = None,
    ledger: LedgerStatement | None = None,
) -> PrivacyStatement:
    """Returns the statement of a sweep.

    Args:
      plan: the sweep's; of a sealed one, its candidates.
      sweep: the sweep's name.
      num_steps: steps charged by trial, for an open sweep.
      ledger: the ledger's lines.
    """
    options = plan.options
    is_open = options.release == OPEN
    charged = num_steps or {}
    proven = [trial for trial in plan.trials if is_proven(trial)]
    return PrivacyStatement(
        sweep=sweep,
        dataset=options.dataset,
        data_are_private=options.data_are_private,
        guarantee_label="proven" if len(proven) == len(plan.trials) else "none",
        num_records_public=plan.num_records_public,
        num_records_source=str(plan.trials[0].params["num_records_public_source"]),
        mode=options.release,
        cost=cost_charged(plan, charged) if is_open else plan.cost,
        budget=plan.cost,
        mechanisms=list(dict.fromkeys(trial.config.mechanism for trial in proven)),
        scores=score_text(plan),
        trials=open_trials(plan.trials, charged, len(charged)) if is_open else None,
        ledger=ledger,
        ledger_note=NO_LEDGER if options.data_are_private else "no ledger: public data need none",
        notes=plan.notes,
    )


def write_statement(statement: PrivacyStatement, folder: Path) -> tuple[Path, Path]:
    """Writes `privacy_statement.json` and `.md`, in place of earlier ones; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{STATEMENT}.json", folder / f"{STATEMENT}.md"
    for path, text in zip(paths, (statement.to_json(), statement.to_markdown()), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def statement_text(statement: PrivacyStatement) -> str:
    """Returns the statement's first lines for the terminal."""
    cost = statement.cost
    shown = [f"privacy: {statement.headline()}"]
    if cost is not None:
        shown += [
            f"  {name}: {value}" for name, value in statement.lines() if name.startswith(("ε", "Ledger"))
        ]
    return "\n".join(shown)
