"""The log of an open sweep, `log.jsonl` in its folder, with a line of JSON for each event."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpgcl_core.durable_files import new_file
from trainers.files.launch_record import LOG_FILE, logged_events

FINISHED, FAILED, RESTARTED, LOST = "finished", "failed", "restarted", "lost"


class SweepLog:
    """The log of the sweep in `folder`, written by its only driver.

    It contains what the operator sees on the terminal, with times. This includes the restarts of private
    trainings, which must not be disclosed to others (docs/private-data.md).
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_FILE

    def write(self, event: str, trial: str, text: str, **facts: Any) -> None:
        """Append an event with its time in UTC; an event that cannot be written is omitted.

        Args:
          event: one of this module's constants, for example `RESTARTED`, or `BEGUN` or `ENDED`.
          trial: the trial's name; "" for an event of the whole sweep.
          text: a text for the operator.
          facts: more values by name, such as numbers of steps.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"time": now, "sweep": self.path.parent.name, "trial": trial, "event": event, "text": text}
        with suppress(OSError), open(self.path, "a", encoding="utf-8", opener=new_file) as file:
            file.write(json.dumps(line | facts) + "\n")

    def restarts(self, trial: str) -> list[str]:
        """Return the texts of a trial's `RESTARTED` events."""
        restarts = logged_events(self.path.parent, RESTARTED)
        return [str(each.get("text")) for each in restarts if each.get("trial") == trial]
