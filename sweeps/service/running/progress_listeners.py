"""The lines of an open sweep in terminal and log, written as its trials finish."""

from __future__ import annotations

from sweeps.service.cluster.stopping import stopped_at
from sweeps.service.console.display import put_result
from sweeps.service.console.terminal import count, headline, print_line
from sweeps.service.running.listeners import SweepBeginning, SweepEnd, TrialResult
from sweeps.service.running.sweep_trials import SweepTrials
from sweeps.service.storage.log import FINISHED, SweepLog
from trainers.files.launch_record import BEGUN, ENDED


class TerminalListener:
    """Prints a line for each finished trial.

    Args:
      trials: the sweep's trials.
    """

    def __init__(self, trials: SweepTrials) -> None:
        self._trials = trials

    def on_begin(self, sweep: SweepBeginning) -> None:
        """Print the sweep's name."""
        print_line(f"sweep: {sweep.name} ({_num_done_text(sweep)})")
        self._num_trials = sweep.num_trials

    def on_result(self, result: TrialResult) -> None:
        """Print a trial's scores."""
        text = result_text(self._trials, result)
        put_result(f"[{result.num_done}/{self._num_trials}] {result.name}: {text}")

    def on_end(self, end: SweepEnd) -> None:
        """No-op: other code prints the end."""


class LogListener:
    """Writes the sweep's log.

    Args:
      log: the sweep's log.
      trials: the sweep's trials.
    """

    def __init__(self, log: SweepLog, trials: SweepTrials) -> None:
        self._log, self._trials = log, trials

    def on_begin(self, sweep: SweepBeginning) -> None:
        """Write an entry for the sweep's beginning."""
        self._log.write(BEGUN, "", _num_done_text(sweep))

    def on_result(self, result: TrialResult) -> None:
        """Write a trial's scores."""
        self._log.write(FINISHED, result.name, result_text(self._trials, result))

    def on_end(self, end: SweepEnd) -> None:
        """Write an entry for the sweep's end."""
        self._log.write(ENDED, "", end.status)


def result_text(trials: SweepTrials, result: TrialResult) -> str:
    """Return a trial's scores as text, and the step at which they ended it early, if they did."""
    text = ", ".join(headline(result.metrics))
    step = stopped_at(trials.by_name[result.name], result.metrics)
    return text if step is None else f"{text}; ended by its scores after {count(step, 'step')}"


def _num_done_text(sweep: SweepBeginning) -> str:
    return f"{sweep.num_done} of {count(sweep.num_trials, 'trial')} done"
