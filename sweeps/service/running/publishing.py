"""Copies of a sweep's results at another address, `--publish-to`: what may be seen, and nothing else.

**Proposition.** What an open sweep sends is a function of what MLflow shows of it, and of its own options. Of
a sealed sweep nothing is sent before its moment, and then the files of `release/` alone.
*Why.* Nothing is sent because it lies somewhere, but because a list names it. `open_files` has the figures,
tables and texts at the top of the sweep's folder, each made of MLflow's content or of the statement, and the
options, which MLflow has as an artifact; never `plan.json`, `log.jsonl`, checkpoints, counts, or anything in
a folder. Of a result `shown_result` takes settings and declared numbers, of private data those that the
release policy lets out. A sealed sweep calls `publish_release` alone, after it was published. ∎

A statement that is sent is true as long as nothing more is drawn: a sweep that trains on takes it away first,
wherever it was sent before, and is refused where that fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dashboards.report.write import REPORT
from dpgcl_core.addresses import masked, masked_text
from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.release.metrics import Release, find_metric
from sweeps.service.running.outbox import AT_THE_END, Outbox, Patience
from sweeps.service.running.terminal import count, say, warn
from sweeps.service.storage.folder import SweepFolder, is_drawn, storage_errors, write_json
from trainers.export.finished import ANSWER
from trainers.export.folder import STATEMENT
from trainers.files.destination import MANIFEST, Content, Copies, Destination, files_below
from trainers.files.resuming import CONFIG_FILE

_STATEMENTS = (f"{STATEMENT}.json", f"{STATEMENT}.md", ANSWER, REPORT)
"""What is true only while nothing more is drawn."""
_NAMED = (*_STATEMENTS, CONFIG_FILE)
_PLACES = "published.json"


def checked_destination(address: str | None, root: Path, *, asks: bool) -> Destination | None:
    """Return where a sweep is published to; None for nowhere.

    Args:
      address: as it was given.
      root: the storage folder.
      asks: whether to see that files can be written there.

    Raises:
      ConfigError: as `Destination.open`, or it lies in the storage folder itself.
      StorageError: files cannot be written there.
    """
    if address is None:
        return None
    destination = Destination.open(address)
    folder = destination.folder
    if folder is not None and folder.is_relative_to(root.resolve()):
        raise ConfigError(f"a sweep must be published outside of its storage folder {root}; got {folder}")
    if asks:
        destination.check()
    return destination


def shown_result(result: Mapping[str, Any], *, is_public: bool) -> bytes:
    """Return what may be seen of a finished training, as JSON.

    Args:
      result: as it is kept.
      is_public: whether the records are; else private-only and undeclared numbers are left out.
    """

    def shown(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if is_public or _may_leave(name)}

    params = {
        name: masked_text(value) if isinstance(value, str) else value
        for name, value in result.get("params", {}).items()
    }
    content = {"params": params, "metrics": shown(result["metrics"]), "series": shown(result["series"])}
    return json.dumps(content, indent=1, sort_keys=True).encode()


def open_files(folder: Path) -> dict[str, Path]:
    """Return the files of an open sweep that may be seen as they are, by name."""
    found = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()}
    return {name: path for name, path in found.items() if name in _NAMED or is_drawn(name)}


def publish_release(
    destination: Destination, name: str, owner: str, release: Path, patience: Patience = AT_THE_END
) -> bool:
    """Copy what a sealed sweep has published; return whether all of it arrived.

    Args:
      destination: where.
      name: of the sweep.
      owner: its id.
      release: its folder `release/`, complete.
      patience: with an address that does not answer.
    """
    copies: list[Copies] = []

    def send(file: str) -> None:
        if not copies:
            copies.append(Copies(destination.at(name), owner))
        if file == MANIFEST:
            copies[0].write_manifest()
        else:
            copies[0].put(file, release / file)

    files = [*files_below(release), MANIFEST]
    with Outbox(send, warn, str(release), server=masked(destination.address), noun="file") as box:
        for file in files:
            box.put(file)
        left = box.finish(patience)
    return _told(destination.at(name), len(files) - 1, left, release)


class Publisher:
    """Copies one open sweep; use it as a context manager.

    Args:
      destination: where its folder is made.
      folder: of the sweep.
      is_public: whether its records are.
    """

    def __init__(self, destination: Destination, folder: SweepFolder, *, is_public: bool) -> None:
        self._destination, self._place = destination, destination.at(folder.name)
        self._folder, self._is_public = folder, is_public
        self._copies: Copies | None = None
        server = masked(destination.address)
        self._outbox = Outbox(self._send, warn, str(folder.path), server=server, noun="file")

    def __enter__(self) -> Self:
        self._outbox.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._outbox.__exit__(kind, error, trace)

    def begin(self, owner: str) -> None:
        """Claim the place, before anything is charged.

        Raises:
          StorageError: it is another sweep's, or does not answer.
        """
        note_place(self._folder, self._destination)
        self._copies = Copies(self._place, owner)
        self._copies.write_manifest()
        self._outbox.put(CONFIG_FILE)

    def finished(self, trial: str) -> None:
        """Have the result of a training copied; return at once."""
        self._outbox.put(_trial_file(trial))

    def end(self, trials: Sequence[str], patience: Patience = AT_THE_END) -> bool:
        """Copy what is missing of these trainings' results and of all else; return whether all arrived."""
        files = [*map(_trial_file, trials), *open_files(self._folder.path), MANIFEST]
        for name in files:
            self._outbox.put(name)
        left = self._outbox.finish(patience)
        return _told(self._place, len(files) - 1, left, self._folder.path)

    def _send(self, name: str) -> None:
        if self._copies is None:
            raise StorageError(f"{masked(self._place.address)} is sent to before the sweep has begun")
        if name == MANIFEST:
            self._copies.write_manifest()
        else:
            self._copies.put(name, self._content(name))

    def _content(self, name: str) -> Content:
        if not name.startswith("trials/"):
            return self._folder.path / name
        result = self._folder.result(Path(name).stem)
        if result is None:
            raise StorageError(f"{self._folder.path / name} is missing; restore it")
        return shown_result(result, is_public=self._is_public)


def withdraw_copies(folder: SweepFolder, owner: str) -> None:
    """Take the statements of an open sweep away wherever they were sent, before more is drawn.

    Figures and tables, too: they state the cost of the whole sweep, which repeated steps may raise.

    Raises:
      StorageError: that fails; the sweep must not draw.
    """
    for address in places_of(folder):
        copies = Copies(Destination.open(address).at(folder.name), owner)
        for name in copies.names:
            if name in _STATEMENTS or is_drawn(name):
                copies.remove(name)


def places_of(folder: SweepFolder) -> list[str]:
    """Return the addresses that an open sweep was sent to, in the order of their first use.

    Raises:
      StorageError: the list is damaged.
    """
    path = folder.path / _PLACES
    try:
        return [str(each) for each in json.loads(path.read_text())] if path.is_file() else []
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path} is damaged; restore it: it tells where the sweep was sent") from error


def note_place(folder: SweepFolder, destination: Destination) -> None:
    """Note durably where a sweep is sent to, before it is. Raises `StorageError`: it cannot be written."""
    known = places_of(folder)
    if destination.address not in known:
        with storage_errors(folder.path):
            write_json(folder.path / _PLACES, [*known, destination.address])


def _trial_file(trial: str) -> str:
    return f"trials/{trial}.json"


def _may_leave(name: str) -> bool:
    metric = find_metric(name)
    return metric is not None and metric.release is not Release.PRIVATE_ONLY


def _told(place: Destination, number: int, left: Sequence[str], kept: Path) -> bool:
    """Say what became of the copies; return whether all arrived."""
    missing = [name for name in left if name != MANIFEST]
    if left:
        warn(f"{masked(place.address)} did not take {count(len(missing), 'file')}; kept in {kept}.")
    else:
        say(f"published: {count(number, 'file')} to {masked(place.address)}")
    return not left
