"""The sweeps that a search starts from: read from their folders once, then stored in the search's own.

Every open sweep stores what its cost depends on: the configurations of its planned trials, and its own
earlier sweeps. A search that starts from it counts them all, with all steps drawn until then. Whatever the
earlier sweep draws later is no concern of the search, which never reads those results. So an earlier sweep
may be continued or deleted, and a resumed search still has the same observations and the same cost.
`sweeps.service.planning.search_plan` states the guarantee.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dpgcl_core.durable_files import make_folder, storage_errors
from dpgcl_core.errors import ConfigError, StorageError
from sweeps.service.planning.inputs import EarlierSweep
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.sweep_statement import count_draws_of
from sweeps.service.storage.sweep_folder import SweepFolder, differences_text, write_json
from sweeps.service.storage.sweep_lock import check_not_running
from trainers.config.training import TrainingConfig

CHARGED_FILE = "charged.json"


@dataclass(frozen=True, kw_only=True)
class ChargedTrials:
    """The facts that the cost of an open sweep depends on, as its folder stores them.

    Attributes:
      facts: the facts that identify its records and their protection, and the account that it is charged to.
      configs: the configurations of its planned trials, by the trial's name.
      earlier: its earlier sweeps, as they were when it began.
    """

    facts: Mapping[str, Any]
    configs: Mapping[str, TrainingConfig]
    earlier: tuple[EarlierSweep, ...]


_CHARGED = TypeAdapter(ChargedTrials)


def store_charged(folder: SweepFolder, plan: SweepPlan, facts: Mapping[str, Any]) -> None:
    """Store what the cost of a sweep that is about to begin depends on; its folder may not exist yet.

    Raises:
      StorageError: the file cannot be written.
    """
    record = ChargedTrials(facts=facts, configs=configs_of(plan), earlier=plan.earlier)
    with storage_errors(folder.path):
        make_folder(folder.path)
        write_json(folder.path / CHARGED_FILE, asdict(record))


def read_charged(folder: SweepFolder) -> ChargedTrials:
    """Return what the cost of a sweep depends on.

    Raises:
      StorageError: the file is missing or damaged.
    """
    path = folder.path / CHARGED_FILE
    try:
        return _CHARGED.validate_python(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is missing or damaged; restore it, or use another sweep") from error


def configs_of(plan: SweepPlan) -> dict[str, TrainingConfig]:
    """Return the configurations of a sweep's planned trials, by the trial's name."""
    return {trial.name: trial.config for trial in plan.trials}


def read_earlier_sweeps(
    root: Path, names: Sequence[str], facts: Mapping[str, Any]
) -> tuple[EarlierSweep, ...]:
    """Return the open sweeps of these names, and the sweeps that they started from.

    Args:
      root: the storage folder.
      names: the names of the sweeps.
      facts: as in `ChargedTrials`, of the sweep that starts from them.

    Raises:
      ConfigError: there is no such open sweep, or it has other facts.
      StorageError: a sweep is running, or its files are damaged.
    """
    sweeps: dict[str, EarlierSweep] = {}
    begun = (file.parent for file in (root / "sweeps").glob("*/plan.json"))
    valid = sorted(folder.name for folder in begun if (folder / CHARGED_FILE).is_file())
    for name in names:
        if name not in valid:
            raise ConfigError(
                f"an earlier sweep must be an open one in {root / 'sweeps'}, begun by this version; got "
                f"{name!r}. Valid: {', '.join(valid) or 'none'}"
            )
        folder = SweepFolder(root / "sweeps" / name)
        check_not_running(folder)
        record = read_charged(folder)
        if record.facts != json.loads(json.dumps(dict(facts))):
            raise ConfigError(
                "an earlier sweep must have the same records, protection and ledger account as the search; "
                f"{name!r} has others{differences_text(dict(record.facts), facts)}. Leave it out"
            )
        note = (
            f"The search starts from results of the sweep {name}, whose {len(record.configs)} trainings are "
            "part of the cost of the whole search."
        )
        sweep = earlier_sweep(folder, record.configs, note)
        sweeps = {each.sweep_id: each for each in record.earlier} | sweeps | {sweep.sweep_id: sweep}
    return tuple(sweeps.values())


def earlier_sweep(folder: SweepFolder, configs: Mapping[str, TrainingConfig], note: str) -> EarlierSweep:
    """Return a sweep with the results and draws that it has now, its trials labelled as in a ledger.

    Args:
      folder: the sweep's folder.
      configs: the configurations of its planned trials, by the trial's name.
      note: a sentence on how another sweep uses its results.
    """
    results, sweep_id = folder.read_results(), str((folder.read_plan() or {})["sweep_id"])
    trials = [Trial(name=name, config=config, params={}) for name, config in configs.items()]
    draws = {each.name: count_draws_of(each, folder, results.get(each.name)) for each in trials}
    label, stored_keys = f"{folder.name}-{sweep_id}/", ("params", "metrics", "config_hash")
    return EarlierSweep(
        sweep=folder.name,
        sweep_id=sweep_id,
        configs={label + name: config for name, config in configs.items()},
        draws={label + name: counts for name, counts in draws.items() if counts is not None},
        note=note,
        results={label + name: {key: each[key] for key in stored_keys} for name, each in results.items()},
    )
