"""Resuming a sweep by its name: its folder has its options, and options that are set again must agree.

Options that no result depends on may differ: where, how fast and how long it runs. Addresses are in the
sweep's plan, because config.yaml is published. Addresses with a password are stored nowhere, and must be
set again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpgcl_core.addresses import has_secret
from dpgcl_core.errors import ConfigError, StorageError
from sweeps.service.options.options_file import OF_ONE_RUN, is_same
from sweeps.service.options.service import ledger_url
from sweeps.service.options.sweep_options import SweepOptions, flags_of
from trainers.config.tree import leaves
from trainers.files.launch_record import CONFIG_FILE, Command, ResumableSweep, resumable_sweeps, resume_line
from trainers.files.storage import inside_ray_job, storage_root

_OF_RESOURCES = (
    *("gpus_per_worker", "max_concurrent_trials", "wait_for_resources", "max_restarts"),
    *("trial_timeout", "stall_timeout", "references", "dataset_id"),
)
"""Options of the whole sweep that no result depends on; the plan rejects another data set's id."""
OptionsOf = Callable[[Path], SweepOptions]


def command_of(options: SweepOptions, name: str) -> Command:
    """Return the command to store in a sweep's plan.

    Args:
      options: the user's options.
      name: the name by which the sweep is continued.
    """
    script: tuple[str, ...] = () if options.overrides is None else ("python", sys.argv[0])
    if script and inside_ray_job():
        script = ("ray", "job", "submit", "--working-dir", ".", "--", *script)
    ledger = ledger_url(options.data, options.ledger)
    if ledger is not None and "://" not in ledger:
        ledger = str(Path(ledger).expanduser().absolute())
    url_by_option = {"ledger": ledger, "tracking_uri": options.storage.tracking_uri}
    addresses: dict[str, Any] = {
        option: url for option, url in url_by_option.items() if url is not None and not has_secret(url)
    }
    if options.ledger.no_ledger:
        addresses["no_ledger"] = True
    return Command(name=name, words=script, options=type(options).__name__, addresses=addresses)


def may_differ(kind: type[SweepOptions], option: str) -> bool:
    """Return whether an option may differ when a sweep is resumed."""
    in_performance = leaves(kind)[option].path[0] == "performance"
    return in_performance or option in OF_ONE_RUN or option in _OF_RESOURCES


def resumed_sweep(
    kind: type[SweepOptions], overrides: Mapping[str, Any], changes: Mapping[str, Any], options_of: OptionsOf
) -> ResumableSweep | None:
    """Return the sweep that a command line resumes; None if the storage folder has no config.yaml of it.

    Args:
      kind: the class of the script's options.
      overrides: values of the command line, by option.
      changes: the overrides and the values of a file, a setting or a preset, by option.
      options_of: returns the options in a config.yaml.

    Raises:
      ConfigError: a change differs from the options that the sweep was started with.
      StorageError: the sweep of this name is another script's or does not exist, or no name is set and no
        sweep is unfinished.
    """
    root = storage_root(overrides.get("storage"))
    sweeps = [sweep for sweep in resumable_sweeps(root) if (sweep.folder / CONFIG_FILE).is_file()]
    if (name := overrides.get("name")) is not None:
        sweep = next((sweep for sweep in sweeps if sweep.name == name), None)
        if sweep is None:
            if not (root / "sweeps" / name).exists():
                raise StorageError(f"nothing to resume: there is no sweep {name!r} in {root / 'sweeps'}")
            return None
        if sweep.command is not None and sweep.command.options != kind.__name__:
            raise StorageError(
                f"the sweep {name!r} was started by another script; continue it with "
                f"{resume_line(sweep.folder)}"
            )
        _check_agreement(sweep, changes, options_of)
        return sweep
    own_sweeps = [sweep for sweep in sweeps if sweep.command and sweep.command.options == kind.__name__]
    agreeing = [sweep for sweep in own_sweeps if not _differences(sweep, changes, options_of)]
    unfinished = [sweep for sweep in agreeing if not sweep.is_finished]
    if unfinished or all(may_differ(kind, option) for option in changes):
        if not unfinished:
            raise StorageError(
                f"nothing to resume: no sweep of this script in {root / 'sweeps'} is unfinished. Set --name "
                "to redraw the figures of a finished sweep."
            )
        return unfinished[0]
    if not agreeing and own_sweeps:
        _check_agreement(own_sweeps[0], changes, options_of)
    return agreeing[0] if agreeing else None


def _check_agreement(sweep: ResumableSweep, changes: Mapping[str, Any], options_of: OptionsOf) -> None:
    if lines := _differences(sweep, changes, options_of):
        raise ConfigError(
            f"the sweep {sweep.name!r} resumes with its original options, and these differ. Leave them out, "
            "or start another sweep without --resume:",
            lines=lines,
        )


def _differences(sweep: ResumableSweep, changes: Mapping[str, Any], options_of: OptionsOf) -> list[str]:
    """Return a line for each option that differs from the recorded one."""
    recorded_options = options_of(sweep.folder / CONFIG_FILE)
    kind, lines = type(recorded_options), list[str]()
    option_leaves, flags = leaves(kind), flags_of(kind)
    for option, value in changes.items():
        recorded_value = option_leaves[option].of(recorded_options)
        if not may_differ(kind, option) and not is_same(value, recorded_value):
            earlier = "without it" if recorded_value is None else f"with {_value_text(recorded_value)}"
            lines.append(f"{flags[option]} {_value_text(value)}: the sweep was started {earlier}")
    return lines


def _value_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
