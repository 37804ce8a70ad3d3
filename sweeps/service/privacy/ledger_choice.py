"""The ledger and data set that a sweep is charged to: the user's choice, checked before anything is read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpgcl_core.errors import ConfigError, LedgerError, LedgerMissing
from dpgcl_core.ledger.cap import line_to_register
from dpgcl_core.ledger.chain import RECORD, Head
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.marks import (
    MARK,
    check_owner,
    check_unmarked,
    check_unmarked_above,
    heads_of_marks,
    is_read_only,
    read_mark,
    read_mark_above,
)
from sweeps.service.options.data import DataOptions, data_path
from sweeps.service.options.service import LedgerOptions, ledger_url
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.config.networks import PrivateStart
from trainers.config.settings import MechanismOptions
from trainers.data.pair_tables import image_files, image_folders


def check_ledger_options(data: DataOptions, options: LedgerOptions, *, dry_run: bool = False) -> None:
    """Check the ledger options: private data need a ledger, or `no_ledger`.

    Args:
      data: the options of the data that the sweep trains and scores on.
      options: the ledger options.
      dry_run: whether nothing will be trained, so that no ledger is needed.

    Raises:
      ConfigError: private data have neither, both are set, or a ledger and a data set's id are not set
        together.
      LedgerError: the training data have a ledger's mark (a file next to them), but no ledger is set, the
        data are declared public, or the mark names another data set; or the evaluation data have a mark.
    """
    for name in (data.evaluate_on or "", data.proxy or "", *data.probe_datasets):
        if path := data_path(name):
            check_unmarked(path)
            for folder in image_folders(name, data.pairs.fitting(name)):
                check_unmarked_above(folder, named_in=path)
    url, (path, mark) = ledger_url(data, options), _find_mark(data)
    if mark is not None and not data.are_private:
        raise LedgerError(
            f"the data in {path} are charged to a ledger as data set {mark[0]!r}, so they are private. Leave "
            "out --data-is public"
        )
    if url is None:
        if options.dataset_id is not None:
            raise ConfigError(
                f"dataset_id = {options.dataset_id!r} needs a ledger: pass --ledger or set $DPGCL_LEDGER"
            )
        missing = ledger_missing(data, options)
        if missing and not dry_run:
            raise ConfigError(missing) if mark is None else LedgerError(missing)
    elif options.dataset_id is None:
        raise ConfigError("a ledger needs the id of the data set to charge: pass --dataset-id NAME")
    elif path is not None and mark is not None:
        check_owner(path, mark, options.dataset_id)


def ledger_missing(data: DataOptions, options: LedgerOptions) -> str | None:
    """Return the error text if private data lack the ledger that they need; None if nothing is missing."""
    if not data.are_private or ledger_url(data, options) is not None:
        return None
    path, mark = _find_mark(data)
    if mark is not None:
        return (
            f"the data in {path} are charged as data set {mark[0]!r} to ledger {mark[1].ledger_id}. "
            f"Pass that ledger as --ledger, and --dataset-id {mark[0]}"
        )
    if options.no_ledger:
        return None
    return (
        "training on private data is charged to a budget ledger: pass --ledger URL (or set $DPGCL_LEDGER) "
        "and --dataset-id NAME. Or pass --no-ledger; the privacy statement will say so. To create a "
        f"ledger, run once: {line_to_register(unit=unit_of(data), create=True)}"
    )


def _find_mark(data: DataOptions) -> tuple[Path | None, tuple[str, Head] | None]:
    """Return the training data's path, and the mark on it or on its images: a data set's id and a head.

    If the path is a list of images, their folders are searched, too: another list of the same images has no
    mark itself. The paths of the images are content of records, and are not returned.
    """
    path = data_path(data.dataset)
    if path is None:
        return None, None
    if mark := read_mark(path):
        return path, mark
    for folder in image_folders(data.dataset, data.pairs_of_training):
        if mark := read_mark_above(folder):
            return path, mark
    return path, None


def marks_note(data: DataOptions, ledger: Ledger | None) -> list[str]:
    """Return a note for plan and statement if no mark can be written next to private data, else nothing."""
    path = data_path(data.dataset)
    if ledger is None or path is None or not data.are_private or not is_read_only(path):
        return []
    return [
        "The folder of the training data cannot be written, so the ledger's mark is stored with the ledger. "
        "Trainings that are charged to another ledger, or to none, would not be recognised. Neither would "
        "an old copy of the ledger that was restored together with its marks."
    ]


def bind_images(ledger: Ledger, dataset_id: str, data: DataOptions) -> bool:
    """Write the ledger's mark on the folders of the images that a list of private data names.

    A list's own mark does not protect against a second list of the same images. A mark on a folder is valid
    for all files in it. So only folders are marked that contain only images of the list (and the list, and
    hidden files); otherwise public data in the folder would be refused, too. Call it before and after the
    first charge, because these marks do not follow later rows of the ledger by themselves.

    Returns:
      Whether all images are protected in this way; True if the data are no list.

    Raises:
      LedgerError: as in `Ledger.bind`; no message names a folder, because that is content of records.
    """
    path, pairs = data_path(data.dataset), data.pairs_of_training
    files = {os.path.realpath(file) for file in image_files(data.dataset, pairs)}
    folders = {os.path.dirname(file) for file in files}
    paths = files if path is None else {*files, os.path.realpath(path)}
    own_folders = [Path(f) for f in sorted(folders) if os.access(f, os.W_OK) and _holds_only(f, paths)]
    heads: set[Head] | None = set()
    try:
        heads = {head for folder in own_folders for head in heads_of_marks(folder, dataset_id)}
    except (LedgerError, OSError):
        heads = None
    if heads is None:  # raised outside `except`, because the traceback would show a message with the folder
        raise LedgerError(
            f"images of {path} carry a mark of another data set or ledger than {dataset_id!r}, or a damaged "
            "mark. Pass the data set that they are charged to as --dataset-id, or restore the mark"
        )
    for head in heads:
        ledger.check_has(head, f"a mark on images of {path}")
    try:
        if own_folders:
            ledger.bind(dataset_id, *own_folders, follow=False)
    except LedgerError:  # a full disk, for example
        return False
    return len(own_folders) == len(folders)


def _holds_only(folder: str, paths: set[str]) -> bool:
    return all(
        name.startswith(".") or name.endswith(MARK) or os.path.join(root, name) in paths
        for root, _, names in os.walk(folder)
        for name in names
    )


def unit_of(data: DataOptions) -> str:
    """Return a record's privacy unit, as a ledger names it: the unit column, or `RECORD` for single rows.

    Raises:
      ConfigError: the column's name is `RECORD`, which is kept for single rows.
    """
    if data.unit_column == RECORD:
        raise ConfigError(
            f"the unit column must not be named {RECORD!r}, which means single rows in a ledger. Rename it"
        )
    return data.unit_column or RECORD


def open_ledger(data: DataOptions, options: LedgerOptions) -> Ledger | None:
    """Open and check the sweep's ledger, and return it; None if the options name no ledger.

    Raises:
      LedgerError: the ledger is missing, unreachable or tampered with, or lacks rows that are recorded in the
        marks on private data.
    """
    url, path = ledger_url(data, options), data_path(data.dataset)
    if url is None:
        return None
    try:
        ledger = Ledger.open(url)
        if options.dataset_id is not None:
            ledger.num_records_public(options.dataset_id)
    except LedgerMissing as error:
        missing = str(error).partition(". Pass another")[0].partition(". To register")[0]
        is_new = not missing.startswith("unknown")
        line = line_to_register(url, str(options.dataset_id), unit=unit_of(data), create=is_new)
        raise LedgerError(
            f"{missing}. Register the data once before you use them, with the ε, the δ and the largest "
            f"number of records N that you choose: {line} (docs/ledger.md)"
        ) from None
    if path is not None and data.are_private and options.dataset_id is not None:
        ledger.check_marks(options.dataset_id, path)
    return ledger


def with_registered_number(
    options: MechanismOptions, ledger: Ledger | None, dataset_id: str | None
) -> MechanismOptions:
    """Return the options with N, the data set's registered number of records; unchanged without a ledger.

    The ledger's total for a data set holds if it has at most N records. So all charges assume the same N,
    which does not depend on the data.

    Raises:
      ConfigError: the options set another number.
      LedgerError: no such data set is registered.
    """
    if ledger is None or dataset_id is None:
        return options
    registered, num_declared = ledger.num_records_public(dataset_id), options.num_records_public
    if num_declared not in (None, registered):
        raise ConfigError(
            f"data set {dataset_id!r} is registered with num_records_public = {registered}, and all its "
            f"charges assume this number; got {num_declared}. Leave --num-records-public out"
        )
    return dataclasses.replace(options, num_records_public=registered)


def account_of(ledger: Ledger | None, dataset_id: str | None) -> dict[str, Any] | None:
    """Return the ids of ledger and data set to store in a sweep's plan; None without a ledger."""
    if ledger is None:
        return None
    return {"ledger_id": ledger.head().ledger_id, "dataset_id": dataset_id}


def check_starts(starts: Mapping[Path, PrivateStart], ledger: Ledger | None) -> None:
    """Check that models trained on the private data were charged to this ledger, and that it has these rows.

    Args:
      starts: models that trainings start from, by the file of their weights.
      ledger: the ledger that the sweep is charged to.

    Raises:
      LedgerError: a model was not charged to it, or there is no ledger.
    """
    for path, start in starts.items():
        if ledger is None:
            raise LedgerError(f"{path} was trained on private data: pass the --ledger that it was charged to")
        ledger.check_has(start.head, f"the privacy statement next to {path}")


def check_account(folder: SweepFolder, ledger: Ledger | None, dataset_id: str | None) -> None:
    """Check that a sweep is resumed with the ledger and data set that it began with.

    Otherwise earlier and later steps would be charged to two accounts. An old copy of the ledger is refused,
    too: it lacks rows up to the head in the plan. A plan of version 0.1.0 gets a head with its next charge.

    Raises:
      LedgerError: the ledger or the data set is another one, or the ledger is an old copy.
    """
    plan = folder.read_plan()
    if plan is None:
        return
    plan_account = plan.get("account")
    if plan_account == account_of(ledger, dataset_id):
        if ledger is not None and "head" in plan:
            ledger.check_has(Head(**plan["head"]), f"the plan of the sweep {folder.name!r}")
        return
    if plan_account is None:
        raise LedgerError(
            f"the sweep {folder.name!r} was begun without a ledger, and a charge must come before the first "
            "step. Resume it without a ledger, or start another sweep under a new --name"
        )
    raise LedgerError(
        f"the sweep {folder.name!r} is charged to a ledger. Resume it with the --ledger whose id is "
        f"{plan_account['ledger_id']} and with --dataset-id {plan_account['dataset_id']}"
    )
