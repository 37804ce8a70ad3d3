"""Ending trainings before their last step: by scores during training, by the clock, or on the user's request.

*By scores* (`--early-stopping`, open sweeps). Ray Tune's own rules, asynchronous successive halving and the
median rule, decide after each score during training whether a training continues.

Guarantee: the planned and stated ε of the sweep and the ε of each training hold, and a ledger's charges stay
within its cap. Sketch: both ε count all T steps of every training, fixed in advance. The scores are of public
records, so they are functions of released iterates (`dpgcl_core.release.metrics`). A rule that ends trainings
by these scores reads each draw at most once, and fewer draws, so all that is released is post-processing of
the planned product of draws (docs/theory/ledger.md, *Step quotas*). A training's number of steps is itself
such an outcome, so no ε is ever computed from the steps that were made. Only the ledger, whose filter bounds
executed steps whatever ended them, gets unused steps back, to the same sum. A training waits for the
decision, so the number of its steps depends only on the scores and their order.

*By the clock* (`--time-budget`). No further training begins, and each running training stops at its next step
and saves. Nothing of it is released, and none of its charge is given back: the step at which a clock stopped
it may depend on the time that its records take. `--resume` continues it, and repeats no step. Trainings that
never began stay reserved for a resume; if nobody will resume, `python -m sweeps.settle` gives them back.

*By the user* (Ctrl-C, SIGTERM; open sweeps). The same happens, and then the driver ends. A second request
does not wait for the step in flight: the processes are ended, and a resume repeats steps, which are charged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from sweeps.service.options.score_options import default_score
from sweeps.service.options.service import ServiceOptions
from sweeps.service.planning.trials import Trial
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.data.dataset import Modality
from trainers.files.oversight import Oversight, Question

ASHA = "asha"
_CHECK_EVERY_SECONDS = 0.2
_NO_CONTROLLER = SimpleNamespace(get_live_trials=tuple)
"""A substitute for Tune's controller without any trials; the median rule queries it."""


class TuneRule:
    """One of Ray Tune's schedulers, which decides score by score.

    Args:
      name: `asha` or `median`.
      first: the first step whose score may end a training.
      last: T, the last step.
    """

    def __init__(self, name: str, first: int, last: int) -> None:
        from ray.tune import schedulers

        tune_schedulers: Any = schedulers
        common = {"time_attr": "step", "metric": "score", "mode": "max", "grace_period": first}
        self._scheduler = (
            tune_schedulers.AsyncHyperBandScheduler(**common, max_t=max(first, last), reduction_factor=3)
            if name == ASHA
            else tune_schedulers.MedianStoppingRule(**common)
        )
        self._trials: dict[str, _TuneTrial] = {}

    def goes_on(self, trial: str, step: int, score: float) -> bool:
        """Return whether a training may continue after a score, which also counts for later decisions."""
        if trial not in self._trials:
            self._trials[trial] = _TuneTrial(trial_id=trial)
            self._scheduler.on_trial_add(_NO_CONTROLLER, self._trials[trial])
        result = {"step": step, "score": score}
        return bool(self._scheduler.on_trial_result(_NO_CONTROLLER, self._trials[trial], result) != "STOP")


class _TuneTrial(SimpleNamespace):
    """The trial object that Tune's rules take, hashed by identity."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Stopping:
    """Decides for one sweep which trainings continue, and ends all when its time is over.

    Args:
      folder: the sweep's folder.
      service: the sweep's limits.
      modality: the records' modality, which determines the score that trainings are compared by.
      clock: returns seconds.

    Attributes:
      is_over: whether the sweep's time is over, or the user has ended it.
    """

    def __init__(
        self,
        folder: SweepFolder,
        service: ServiceOptions,
        modality: Modality,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._service, self._modality, self._clock = folder, service, modality, clock
        self._start_seconds, self._last_check_time = clock(), -float("inf")
        self._rules: dict[tuple[object, ...], TuneRule] = {}
        self.is_over = False

    def oversight(self, trial: str) -> Oversight:
        """Return the files by which a training asks whether to continue, and gets the answer."""
        by_scores = self._service.early_stopping != "none"
        return Oversight(count_file=self._folder.count_file(trial), by_scores=by_scores)

    def begin(self, trials: Sequence[Trial]) -> None:
        """Remove earlier drivers' requests to stop, so that trainings can continue."""
        for trial in trials:
            self.oversight(trial.name).begin()

    def update(self, running: Mapping[str, Trial], *, must_end: bool = False) -> None:
        """Answer the trainings that ask whether to continue, or end all when the time is over.

        Args:
          running: the running trainings, by name.
          must_end: end all now, because the user has ended the sweep.
        """
        now = self._clock()
        if now - self._last_check_time < _CHECK_EVERY_SECONDS and not must_end:
            return
        self._last_check_time, budget = now, self._service.time_budget
        self.is_over |= must_end or (budget is not None and now - self._start_seconds >= 60 * budget)
        for name, trial in running.items():
            oversight = self.oversight(name)
            if self.is_over:
                oversight.stop()
            elif oversight.by_scores:
                self._answer(trial, oversight)

    def _answer(self, trial: Trial, oversight: Oversight) -> None:
        if (question := oversight.question()) is None:
            return
        ended = oversight.ended_at()  # in an earlier attempt, possibly by an earlier driver
        goes_on = question.step < ended if ended is not None else self._should_go_on(trial, question)
        oversight.answer(question, goes_on=goes_on)

    def _should_go_on(self, trial: Trial, question: Question) -> bool:
        name = default_score(self._modality, trial.config.mechanism.method)
        score = question.scores.get(name)
        return score is None or self._rule_for(trial, name).goes_on(trial.name, question.step, score)

    def _rule_for(self, trial: Trial, score: str) -> TuneRule:
        """Return the rule for trainings with this one's guarantee label, T, score and score interval."""
        config = trial.config
        last, every = config.mechanism.num_steps, config.evaluation.score_every_steps
        key = (config.guarantee_label, score, last, every)
        if key not in self._rules:
            self._rules[key] = TuneRule(self._service.early_stopping, max(1, every), last)
        return self._rules[key]


def stopped_at(trial: Trial, metrics: Mapping[str, float]) -> int | None:
    """Return the step at which a finished training was ended by its scores; None if it made all steps.

    A result without a number of steps is from a version that ended no trainings early.
    """
    num_done = metrics.get("num_steps_done")
    return int(num_done) if num_done is not None and num_done < trial.config.mechanism.num_steps else None
