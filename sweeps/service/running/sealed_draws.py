"""A sealed sweep's folder and draws: K and every setting, drawn in secret and fixed before any trial runs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpgcl_core.accounting.tuning.laws import TrialCountLaw
from dpgcl_core.durable_files import make_folder
from dpgcl_core.errors import ConfigError, LedgerError, StorageError
from dpgcl_core.ledger.chain import Head
from dpgcl_core.ledger.report import LedgerStatement
from sweeps.service.options.release_options import trial_law
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import remaining_budget
from sweeps.service.privacy.sealed_charge import reserve
from sweeps.service.running.prepare import PreparedSweep
from sweeps.service.storage.sweep_folder import SweepFolder, write_json

RESULT = "result.json"
"""The last published file in `release/`."""
_HIDDEN_PARAMS = ("repeat", "num_candidates")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The random choices for one trial, made before any trial runs.

    Attributes:
      candidate: the index of its setting among the sweep's settings.
      public_seed: seed of its initialisation and views; random, as a counter would reveal its position.
      coin: a random number; among trials of equal score the largest coin wins.
    """

    candidate: int
    public_seed: int
    coin: int


def draw_trials(law: TrialCountLaw, num_candidates: int) -> tuple[Draw, ...]:
    """Draw K from `law`, and return K independent draws of a uniform setting; all by the system's entropy."""
    return tuple(
        Draw(
            candidate=secrets.randbelow(num_candidates),
            public_seed=secrets.randbelow(2**31),
            coin=secrets.randbits(62),
        )
        for _ in range(law.draw())
    )


def trials_of_draws(candidates: Sequence[Trial], draws: Sequence[Draw]) -> tuple[Trial, ...]:
    """Return a trial for each draw, named after its position, which must not leave `trusted/`."""
    trials = []
    for number, draw in enumerate(draws):
        candidate = candidates[draw.candidate]
        config = replace(candidate.config, public_seed=draw.public_seed)
        params = {k: v for k, v in candidate.params.items() if k not in _HIDDEN_PARAMS}
        params |= {"public_seed": draw.public_seed}
        trials.append(Trial(name=f"draw-{number}", config=config, params=params))
    return tuple(trials)


def choose(
    trials: Sequence[Trial],
    draws: Sequence[Draw],
    results: Mapping[str, Mapping[str, Any]],
    *,
    select_by: str,
    min_score: float | None,
) -> Trial | None:
    """Return the trial to publish; None if no trial has a score, or none reaches `min_score`.

    Without `min_score` it is the trial with the highest score; else the first trial that reaches `min_score`.
    """
    scored_trials = []
    for trial, draw in zip(trials, draws, strict=True):
        score = results.get(trial.name, {}).get("metrics", {}).get(select_by)
        if score is not None and np.isfinite(score):
            scored_trials.append((score, draw.coin, trial))
    if min_score is not None:
        return next((trial for score, _, trial in scored_trials if score >= min_score), None)
    return max(scored_trials, key=lambda entry: entry[:2])[2] if scored_trials else None


@dataclass(frozen=True, kw_only=True)
class SealedStart:
    """The values that are fixed at the start of a sealed sweep.

    Attributes:
      draws: the draws of its trials.
      ledger: the ledger's part of the statement, as of the charge; None without a ledger.
      time: the start, before anything was drawn, in seconds since the epoch.
      budget: the ledger's remaining ε and number of trainings after the charge; None without a ledger.
    """

    draws: tuple[Draw, ...]
    ledger: LedgerStatement | None
    time: float
    budget: tuple[float | None, int] | None = None


@dataclass(frozen=True)
class SealedFolder:
    """A sealed sweep's folder: `trusted/` is secret, `release/` is to be published.

    Attributes:
      folder: the sweep's folder, which also has the lock and the plan; the plan does not contain K.
    """

    folder: SweepFolder

    @property
    def trusted(self) -> SweepFolder:
        """The folder of trials and checkpoints."""
        return SweepFolder(self.folder.path / "trusted")

    @property
    def release(self) -> Path:
        """The folder that may be passed on: the statement, the published run and its weights."""
        return self.folder.path / "release"

    @property
    def outgoing(self) -> Path:
        """The folder of the files that will be copied to `release/` at the moment of publication."""
        return self.trusted.path / "outgoing"

    def begin(self, sweep: PreparedSweep, plan: SweepPlan, start_time: float) -> SealedStart:
        """Charge a new sweep, then draw and store its trials; for a resumed sweep return the stored start.

        Args:
          sweep: the sweep, with the ledger and data set to charge.
          plan: its plan, which has the time of publication.
          start_time: the current time, in seconds since the epoch; a resumed sweep keeps its first start.

        Raises:
          LedgerError: the sweep cannot be charged; nothing was drawn.
          StorageError: the resumed sweep's stored draws are missing or damaged.
        """
        path, ledger, dataset_id = self.trusted.path / "sealed.json", sweep.ledger, str(sweep.dataset_id)
        if self.folder.read_plan() is not None:
            start = self._read(path)
            if ledger is not None and start.ledger is None:
                raise LedgerError(
                    f"the sweep {self.folder.name!r} was begun without a ledger, and a charge must come "
                    "before the draws. Resume it without a ledger"
                )
            return start
        if plan.publication is None:
            raise ConfigError(
                "a sealed sweep needs a moment of publication before it draws its number of trials"
            )
        statement = reserve(ledger, dataset_id, plan, self.folder.name) if ledger is not None else None
        # Read before K is drawn, so that the budget reveals nothing about K.
        budget = remaining_budget(ledger, dataset_id, plan.trials) if ledger is not None else None
        draws = draw_trials(trial_law(plan.release, plan.max_trials), len(plan.trials))
        self._make_trusted()
        ledger_lines = asdict(statement) if statement is not None else None
        rows = [vars(draw) for draw in draws]
        write_json(path, {"draws": rows, "ledger": ledger_lines, "started": start_time, "left": budget})
        facts = {"fingerprint": plan.fingerprint, "params": plan.params(), "sweep_id": sweep.sweep_id}
        if statement is not None:
            facts["head"] = vars(statement.head)
        terms = {"account": sweep.facts["account"], "publication": asdict(plan.publication)}
        self.folder.create(facts | terms, sweep.repetition)
        return SealedStart(draws=draws, ledger=statement, time=start_time, budget=budget)

    def _make_trusted(self) -> None:
        """Create all subfolders of `trusted/` now: each later one would change its time, which others see."""
        make_folder(self.trusted.path, mode=0o700)
        for name in ("trials", "checkpoints", "started", "drawn", "ray", self.outgoing.name):
            make_folder(self.trusted.path / name)

    def _read(self, path: Path) -> SealedStart:
        try:
            values = json.loads(path.read_text())
            draws = tuple(Draw(**draw) for draw in values["draws"])
            lines = values["ledger"]
            statement = LedgerStatement(**{**lines, "head": Head(**lines["head"])}) if lines else None
            budget = None if values.get("left") is None else tuple(values["left"])
            return SealedStart(draws=draws, ledger=statement, time=float(values["started"]), budget=budget)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{path} is missing or damaged, so the secret number of trials is lost. This sweep cannot "
                "continue, and its charge stays. A sweep under a new --name is charged in full again"
            ) from error
