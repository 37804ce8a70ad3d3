"""The sweeps of a storage folder and how far each one is, as a page.

*What may be seen.* Nothing of a sealed sweep is shown: only the plan in its folder is opened. For private
data, and for data that the plan does not mark as public, the steps of a training are shown in tenths and
never decrease. So an observer can neither time single steps nor count restarts. No scores are shown here: a
sweep's scores are in its report, behind the release policy.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from dashboards.render.document import RELOAD, document_of, header_of
from dashboards.serve.folders import RUNNING, OpenFolder, open_folders
from dpgcl_core.addresses import masked, masked_text
from dpgcl_core.errors import DpgclError
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.remaining import remaining_of
from trainers.files.launch_record import resume_line
from trainers.files.progress import Progress, fraction_done

INDEX_SCRIPTS = (RELOAD,)
_RELOAD_SECONDS = 5
_QUIET_SECONDS, _PRIVATE_QUIET_SECONDS = 300.0, 3600.0
"""Time without progress after which the page says so; for private data later, and without a number,
because that would time long steps."""


class SweepIndex:
    """Lists the sweeps of a storage folder; nothing is ever written.

    Args:
      root: the storage folder.
      now: function that returns seconds since the epoch, to report how long there was no progress.
    """

    def __init__(self, root: Path, now: Callable[[], float] = time.time) -> None:
        self._root, self._now = root, now
        self._furthest: dict[tuple[str, str], Progress] = {}
        self._lock = threading.Lock()

    def page(self) -> str:
        """Return the page of all sweeps, running sweeps first; it is reloaded every few seconds."""
        folders = open_folders(self._root)
        folders.sort(key=lambda folder: (folder.status != RUNNING, -folder.start_seconds))
        articles = "".join(map(self._article, folders)) or "<p>This storage folder has no sweep yet.</p>"
        below = '<p class="soft">Sealed sweeps are not shown. <a href="/ledgers">Ledgers</a></p>'
        main = f'<main id="main" data-reload-seconds="{_RELOAD_SECONDS}">{articles}</main>'
        return document_of("Sweeps · dpgcl", header_of("Sweeps", below) + main, scripts=INDEX_SCRIPTS)

    def report(self, name: str) -> Path | None:
        """Return the report that an open sweep has written; None without a report."""
        return next((folder.report for folder in open_folders(self._root) if folder.name == name), None)

    def _article(self, folder: OpenFolder) -> str:
        """Return the page's part on one sweep: status, progress, and a link to its report."""
        name, status, finished_trials = html.escape(folder.name), folder.status, folder.find_finished_trials()
        if folder.report is not None:
            name = f'<a href="/reports/{quote(folder.name, safe="")}">{name}</a>'
        running = self._visible_progress(folder, finished_trials) if status == RUNNING else {}
        return (
            f'<article class="sweep"><h2>{name}</h2>'
            f'<p><span class="state {status}">{status}</span> {html.escape(masked_text(folder.subject))}</p>'
            f"{_progress_bar(len(finished_trials), folder.num_trials, running)}"
            f"{_list([f'{trial}: {_step_text(progress)}' for trial, progress in sorted(running.items())])}"
            f"{self._quiet_note(folder) if running else ''}</article>"
        )

    def _visible_progress(self, folder: OpenFolder, finished_trials: set[str]) -> dict[str, Progress]:
        """Return the progress that may be shown of each trial without a result, by trial name."""
        if folder.data_are_public:
            return folder.progress(finished_trials)
        with self._lock:
            for trial, progress in folder.progress(finished_trials).items():
                before, now = self._furthest.get((folder.identity, trial)), progress.in_tenths
                if before is None or now.step > before.step:
                    self._furthest[folder.identity, trial] = now
            steps = {
                trial: progress
                for (identity, trial), progress in self._furthest.items()
                if identity == folder.identity
            }
        return {trial: progress for trial, progress in steps.items() if trial not in finished_trials}

    def _quiet_note(self, folder: OpenFolder) -> str:
        seconds = self._now() - folder.last_sign
        if seconds < (_QUIET_SECONDS if folder.data_are_public else _PRIVATE_QUIET_SECONDS):
            return ""
        quiet = f"{seconds / 60:.0f} min" if folder.data_are_public else "an hour or more"
        note = f"No progress for {quiet}; if the driver has ended, continue the sweep with "
        return f'<p class="warning">{html.escape(note + resume_line(folder.path))}</p>'


def ledgers_page(addresses: Sequence[str]) -> str:
    """Return the page of what remains of every cap in each ledger, or why the ledger cannot be read."""
    parts = [f"<h2>{html.escape(masked(ledger))}</h2>{_list(_ledger_lines(ledger))}" for ledger in addresses]
    parts = parts or ["<p>No ledger is set. Use --ledger or $DPGCL_LEDGER.</p>"]
    head = header_of("Remaining budgets", '<p><a href="/">All sweeps</a></p>')
    return document_of("Ledgers · dpgcl", f'{head}<main id="main">{"".join(parts)}</main>')


def _ledger_lines(address: str) -> list[str]:
    try:
        ledger = Ledger.open(address)
        return [line for dataset in ledger.dataset_ids() for line in remaining_of(ledger, dataset).lines()]
    except DpgclError as error:
        return [f"The ledger cannot be read: {error}"]


def _progress_bar(num_done: int, num_trials: int | None, running: Mapping[str, Progress]) -> str:
    """Return a bar with the share of all steps that are done; empty if the number of trials is unknown."""
    if num_trials is None:
        return ""
    done = min(1.0, (num_done + sum(map(fraction_done, running.values()))) / num_trials)
    return (
        f'<p class="bar"><progress max="1" value="{done:.4f}" aria-label="Steps done"></progress>'
        f"<span>{num_done} of {num_trials} trials</span></p>"
    )


def _step_text(progress: Progress) -> str:
    is_over = progress.step >= progress.num_steps
    return "scoring" if is_over else f"step {progress.step} of {progress.num_steps}"


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>" if texts else ""
