"""A sweep's answer, the recommended setting and why: computed from the results on disk, stored and printed.

`answer.json` is in the sweep's folder, or in `release/` for a sealed sweep; export reads it there. It uses
only released values. For an open sweep these are all trials. For a sealed sweep they are the published run,
the statement's numbers, and the ledger's remaining budget after the charge, before K was drawn.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dashboards.compose.answer import OWN, Answer, PrivacyNumbers, answer_of
from dashboards.compose.questions import QUESTIONS
from dashboards.query.trial_frames import typed
from dpgcl_core.accounting.tuning.cost import TuningCost
from trainers.export.sweep_results import ANSWER
from trainers.files.outcome_file import Outcomes


def sweep_answer(
    question: str,
    rows: Sequence[Mapping[str, Any]],
    tags: Mapping[str, Any],
    cost: TuningCost | None,
    remaining_budget: tuple[float | None, int] | None = None,
    outcomes: Mapping[str, Outcomes] | None = None,
) -> Answer | None:
    """Return the answer of a sweep from its trials' results; None if no trial has a score.

    Args:
      question: the name of the sweep's question, for example `group-size`.
      rows: for each trial its `trial` (name), `guarantee_label`, `params` and `metrics`.
      tags: the tags and reference scores that all trials share.
      cost: the sweep's privacy cost; None without a guarantee.
      remaining_budget: the ledger's remaining ε and number of trainings; None without a ledger.
      outcomes: each public test record's contribution to the scores, by the trial's name.

    Raises:
      DashboardError: as in `dashboards.compose.answer.answer_of`.
    """
    trial_rows = []
    for row in rows:
        params = {name: typed(str(value)) for name, value in row["params"].items()}
        identity = {name: row[name] for name in ("trial", "guarantee_label") if row.get(name) is not None}
        trial_rows.append({**tags, **params, **row["metrics"], **identity})
    frame = pd.DataFrame(trial_rows)
    frame = frame.astype({"group_size": object}) if "group_size" in frame else frame
    epsilon, num_trainings = remaining_budget if remaining_budget is not None else (None, None)
    numbers = {name: getattr(cost, name, None) for name in ("training_epsilon", "tuned_epsilon", "delta")}
    privacy = PrivacyNumbers(**numbers, epsilon_remaining=epsilon, trainings_remaining=num_trainings)
    return answer_of(frame, QUESTIONS.get(question, OWN), privacy, outcomes)


def write_answer(answer: Answer, folder: Path) -> Path:
    """Write `answer.json`, replacing an earlier file; return its path."""
    path = folder / ANSWER
    path.write_text(json.dumps(answer.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def answer_text(answer: Answer) -> str:
    """Return the answer as printed, without the privacy statement's numbers, which are printed before it."""
    first, *lines = dataclasses.replace(answer, privacy=None).lines()
    num_remaining = answer.privacy.trainings_remaining if answer.privacy is not None else None
    if num_remaining is not None:
        noun = "training" if num_remaining == 1 else "trainings"
        lines.append(f"The ledger allows {num_remaining} more {noun} like the costliest of these.")
    return "\n  ".join([f"answer: {first}", *lines])
