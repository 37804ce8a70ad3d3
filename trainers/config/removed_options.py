"""Options of earlier versions: the values that a file may still hold, and what to use instead.

A configuration file, a checkpoint or a command of an earlier version may name a removed option. If it has the
value at which the option did nothing, the training is the same without it, so the file is read. Any other
value requests something that no training does any more, so it is rejected with the changelog's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpgcl_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RemovedField:
    """A removed option.

    Attributes:
      default: the value at which the option did nothing.
      line: the changelog's line: the version that removed it, and what to use instead.
      is_secret: whether a value may hold a password, so that no message repeats it.
    """

    default: Any
    line: str
    is_secret: bool = False


_NO_VIEW_DRAWS = (
    "removed in 0.2.0: use a larger --expected-batch-size, or more --num-steps, to get as many views"
)
_NO_NEGATIVES = "removed in 0.2.0: use --warm-start, which learns from public records before the training"
_NO_SUBSPACE = "removed in 0.2.0: use --warm-start with public records; --lora-rank trains fewer weights"
_NO_FEW_SHOT = "removed in 0.2.0: use --max-index-records to fit the probes on few labelled records"
_NO_NOTIFY = "removed in 0.2.0: use a command after the sweep that reads its exit code (docs/cluster.md)"
_NO_SEARCH = "removed in 0.2.0: use --release, where open runs the whole grid and sealed draws from it"
_NO_STUDY_STORAGE = "removed in 0.2.0: use study.journal in the search's folder; optuna.copy_study copies it"
_NO_MEASURED_SNR = "removed in 0.2.0: use dpgcl_core.planning.feasible: set alignment_size of its PlanRequest"
_NO_COPIES = (
    "removed in 0.2.0: use a bucket for MLflow's artifacts (mlflow server --artifacts-destination), or aws "
    "s3 cp --recursive (docs/cluster.md)"
)
_NO_PUBLISHED = (
    "removed in 0.2.0: use the table in docs/planning.md, or python -m dpgcl_core.calculator epsilon for "
    "one of its rows"
)

REMOVED_FIELDS: Mapping[str, RemovedField] = {
    "objective.num_view_draws": RemovedField(default=1, line=_NO_VIEW_DRAWS),
    "public.num_public_negatives": RemovedField(default=0, line=_NO_NEGATIVES),
    "public.subspace_dim": RemovedField(default=0, line=_NO_SUBSPACE),
    "public.subspace_groups": RemovedField(default=None, line=_NO_SUBSPACE),
    "public.subspace_every_steps": RemovedField(default=1, line=_NO_SUBSPACE),
    "data.public_records": RemovedField(default=None, line=_NO_NEGATIVES),
    "evaluation.few_shot": RemovedField(default=[], line=_NO_FEW_SHOT),
    "release.search": RemovedField(default="auto", line=_NO_SEARCH),
    "study_storage": RemovedField(default=None, line=_NO_STUDY_STORAGE, is_secret=True),
    "measured_snr": RemovedField(default=None, line=_NO_MEASURED_SNR),
    "service.notify": RemovedField(default=None, line=_NO_NOTIFY, is_secret=True),
    "published": RemovedField(default=False, line=_NO_PUBLISHED),
    "storage.publish_to": RemovedField(default=None, line=_NO_COPIES, is_secret=True),
}
"""The removed options by their place in a configuration file, section and field."""

REMOVED_CHOICES: Mapping[tuple[str, str], str] = {
    ("optimizer", "noise_sgd"): (
        "removed in 0.2.0: use --optimizer sgd with its learning rate times divisor / (noise_multiplier · "
        "sensitivity), which takes the same steps if there is no weight decay"
    ),
    ("optimizer", "lars"): "removed in 0.2.0: use --optimizer adamw, or sgd with its own learning rate",
    ("sampler", "qmc"): "removed in 0.2.0: use --sampler random, which uses no scores either",
}
"""The changelog's lines by (option, removed value), for options that still exist."""


def check_removed_field(key: str, value: Any) -> None:
    """Raise ConfigError unless a removed option has the value at which it did nothing.

    Args:
      key: a key of `REMOVED_FIELDS`.
      value: the option's value.

    >>> check_removed_field("objective.num_view_draws", 1)
    >>> check_removed_field("public.subspace_dim", 4)
    Traceback (most recent call last):
    ...
    dpgcl_core.errors.ConfigError: public.subspace_dim = 4 was removed in 0.2.0: use --warm-start with \
public records; --lora-rank trains fewer weights
    """
    field = REMOVED_FIELDS[key]
    if value != field.default or type(value) is not type(field.default):
        shown = key if field.is_secret else f"{key} = {value!r}"
        raise ConfigError(f"{shown} was {field.line}")


def is_removed_section(key: str) -> bool:
    """Whether a configuration file's section of this name held options that were removed.

    >>> is_removed_section("public"), is_removed_section("pub")
    (True, False)
    """
    return any(each.startswith(f"{key}.") for each in REMOVED_FIELDS)


def removed_option_line(option: str) -> str | None:
    """Return the changelog's line for a removed option, as typed on a command line; None for any other.

    >>> removed_option_line("--num-view-draws").partition(":")[0], removed_option_line("--num-steps")
    ('removed in 0.2.0', None)
    """
    name = option.removeprefix("--").replace("-", "_")
    return next((each.line for key, each in REMOVED_FIELDS.items() if key.split(".")[-1] == name), None)


def check_removed_choice(option: str, value: str) -> None:
    """Raise ConfigError if `value` was removed from the choices of `option`.

    >>> check_removed_choice("optimizer", "adam")
    """
    line = REMOVED_CHOICES.get((option, value))
    if line is not None:
        raise ConfigError(f"{option} = {value!r} was {line}")
