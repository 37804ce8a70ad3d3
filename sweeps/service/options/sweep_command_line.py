"""The command line of a sweep: its starting values, the user's options, and contradictions among them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from dpgcl_core.command_line import errors_in_one_line
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.registry import method_named
from sweeps.service.options.help import mark_type, show_help
from sweeps.service.options.options_file import OptionsFile, read_options
from sweeps.service.options.resume_options import resumed_sweep
from sweeps.service.options.start import Start
from sweeps.service.options.sweep_options import SweepOptions, errors_in_flags, varied_by
from trainers.config.presets import OWN_NETWORKS, named_setting
from trainers.config.removed_options import removed_option_line
from trainers.config.settings import TrainingOptions
from trainers.config.tree import leaves, replace_options
from trainers.data.loading import check_dataset_name, modality_of_name
from trainers.data.pair_options import PairOptions
from trainers.files.launch_record import CONFIG_FILE

Options = TypeVar("Options", bound=SweepOptions)


# The options of a pair exclude each other: one on the command line replaces the other one in a file.
_INSTEAD = {
    "epsilon": "noise_multiplier",
    "noise_multiplier": "epsilon",
    "expected_batch_size": "sampling_prob",
    "warm_start": "pretrained",
    "pretrained": "warm_start",
}
_OF_ONE_DATASET = ("data_is", "unit_column", "num_records_public", "delta", "dataset_id", "no_ledger")
"""Options in a file that describe its own data set; for another data set they must be set again.

That one data set is public implies nothing about another: private records would be trained on as public.
"""
_OF_TRAININGS = (*(each.name for each in dataclasses.fields(TrainingOptions)), "data")


def parse_options(
    kind: type[Options],
    *,
    description: str | None,
    arguments: Sequence[str] | None = None,
    announces: bool = True,
) -> Options:
    """Return a sweep's options: the command line's, then a preset's (`--full`), a file's, a setting's.

    Args:
      kind: the class of the sweep's options.
      description: the text for `--help`.
      arguments: the command line without the program; None for this process's own.
      announces: print a line before torch is loaded, which takes seconds; ignored with `arguments`.

    Raises:
      ConfigError: an option is unknown, or a value or a combination breaks a rule.
      SystemExit: help was requested, and is printed.
    """
    with errors_in_flags(kind):
        words = list(sys.argv[1:] if arguments is None else arguments)
        return _parse_words(kind, description, words, announces=announces and arguments is None)


def _parse_words(
    kind: type[Options], description: str | None, words: list[str], *, announces: bool
) -> Options:
    """Return the options of the command line's words, checked and complete; see `parse_options`."""
    help_flags = {"-h", "--help", "--help-all"} & set(words)
    words = [word for word in words if word not in help_flags]
    _refuse_unknown_options(kind, words)
    overrides = _parse_values(kind, words)
    start = Start(**{name: overrides.pop(name) for name in leaves(Start) if name in overrides})
    resumes = overrides.get("resume") and not help_flags
    if resumes and (options := _resumed(kind, start, overrides)) is not None:
        return options
    file = None if start.config is None else read_options(kind, start.config)
    options = replace_options(_starting_point(kind, start, file, overrides), **overrides)
    if help_flags:
        show_help(start, options, description, is_full="--help-all" in help_flags)
        raise SystemExit(0)
    if announces and not options.service.is_quiet:
        print(f"{Path(sys.argv[0]).stem.replace('_', ' ')}: loading …", flush=True)
    names = frozenset({*overrides, *(file.values if file else ())})
    options = dataclasses.replace(options.completed(names), overrides=names)
    _check_contradictions(options, overrides)
    return options


def _resumed(kind: type[Options], start: Start, overrides: Mapping[str, Any]) -> Options | None:
    """Return the options of the resumed sweep, from its folder; None if the folder has none."""

    def options_of(path: Path) -> Options:
        return _completed(kind, Start(config=path), {})

    sweep = resumed_sweep(kind, overrides, _collect_changes(kind, start, overrides), options_of)
    if sweep is None:
        return None
    addresses = dict({} if sweep.command is None else sweep.command.addresses)
    if {"ledger", "no_ledger"} & overrides.keys():
        addresses.pop("ledger", None)
        addresses.pop("no_ledger", None)
    options = options_of(sweep.folder / CONFIG_FILE)
    names = frozenset({*(options.overrides or ()), *overrides})
    options = replace_options(options, **{**addresses, **overrides, "name": sweep.name})
    return dataclasses.replace(options, overrides=names)


def _collect_changes(kind: type[Options], start: Start, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a command line, a file, a setting or a preset change, by option."""
    if start == Start():
        return dict(overrides)
    options, default = _completed(kind, start, overrides), kind()
    values = {name: (leaf.of(options), leaf.of(default)) for name, leaf in leaves(kind).items()}
    return {name: value for name, (value, before) in values.items() if name in overrides or value != before}


def words_of_options(options: SweepOptions, values: Mapping[str, Any]) -> list[str]:
    """Return the command-line words for another sweep on these data with these options.

    Args:
      options: the options of the trainings and the data.
      values: the other sweep's values by option, which come first; ε is among them, or on an axis.
    """
    data, method = options.data.dataset, options.mechanism.method
    default_options = _completed(SweepOptions, Start(), {"dataset": data, "method": method})
    default = leaves(SweepOptions)["method"].of(SweepOptions())
    words = ["--dataset", data, *(["--method", method] if method != default else [])]
    for name, value in values.items():
        words += _typed_words(name, value)
    written_options = {"dataset", "method", "epsilon", *values, *varied_by(type(options))}
    for name, leaf in leaves(SweepOptions).items():
        is_excluded = name in written_options or leaf.path[0] not in _OF_TRAININGS
        if not is_excluded and leaf.of(options) != leaf.of(default_options):
            words += _typed_words(name, leaf.of(options))
    return words


def _typed_words(name: str, value: Any) -> list[str]:
    """Return the command-line words that set an option.

    >>> _typed_words("group_sizes", (4, "batch")), _typed_words("non_private", False)
    (['--group-sizes', '4', 'batch'], ['--no-non-private'])
    """
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    parts = value if isinstance(value, tuple) else (value,)
    return [f"--{flag}", *(f"{part:.17g}" if isinstance(part, float) else str(part) for part in parts)]


def _completed(kind: type[Options], start: Start, overrides: Mapping[str, Any]) -> Options:
    """Return the options of a start, with the overrides, then completed (`SweepOptions.completed`)."""
    file = None if start.config is None else read_options(kind, start.config)
    options = replace_options(_starting_point(kind, start, file, overrides), **overrides)
    names = frozenset({*overrides, *(file.values if file else ())})
    return dataclasses.replace(options.completed(names), overrides=names)


def _starting_point(
    kind: type[Options], start: Start, file: OptionsFile | None, overrides: Mapping[str, Any]
) -> Options:
    """Return the options of setting, file and preset; each overrides the ones before it."""
    file_values = {} if file is None else dict(file.values)
    for name in overrides:
        file_values.pop(_INSTEAD.get(name, ""), None)
    default = kind()
    file_dataset = file_values.get("dataset", default.data.dataset)
    if overrides.get("dataset", file_dataset) != file_dataset:
        for name in _OF_ONE_DATASET:
            file_values.pop(name, None)
    dataset = _dataset(overrides, _with_preset(default, start), default, file_values)
    options = replace_options(default, dataset=dataset)
    setting = _setting(start, file, dataset, {**file_values, **overrides})
    if setting is not None:
        options = replace_options(
            options, **{name: leaf.of(setting) for name, leaf in leaves(TrainingOptions).items()}
        )
    options = replace_options(options, **file_values)
    options = _with_preset(options, start)
    if file is None and not (start.tiny or start.full):
        options = options.of_dataset()
    names = {*overrides, *file_values}
    if overrides.get("warm_start") is not None:  # they replace the weights that the setting names
        options = replace_options(options, pretrained=TrainingOptions().network.pretrained)
    method_name = overrides.get("method", options.mechanism.method)
    if method_name == TrainingOptions().mechanism.method:  # settings are made for the default method
        return options
    method = method_named(method_name)
    if "num_augmentations" not in names and not method.takes_augmented_keys:
        options = replace_options(options, num_augmentations=0)
    if "network" not in names and method.task in OWN_NETWORKS:
        options = replace_options(options, network=OWN_NETWORKS[method.task])
        if "pretrained" not in names:  # the setting names another network's weights
            options = replace_options(options, pretrained=TrainingOptions().network.pretrained)
    return options


def _with_preset(options: Options, start: Start) -> Options:
    return options.tiny() if start.tiny else options.full() if start.full else options


def _dataset(
    overrides: Mapping[str, Any], preset: SweepOptions, default: SweepOptions, file_values: Mapping[str, Any]
) -> str:
    """Return the data set of the command line, else of the preset, else of the file."""
    dataset = overrides.get("dataset", preset.data.dataset)
    if "dataset" not in overrides and preset.data.dataset == default.data.dataset:
        dataset = file_values.get("dataset", dataset)
    check_dataset_name(dataset)
    return str(dataset)


def _setting(
    start: Start, file: OptionsFile | None, dataset: str, option_values: Mapping[str, Any]
) -> TrainingOptions | None:
    """Return the named setting to start from; None for the plain defaults, as for a file without one."""
    name = start.setting or (file.setting if file is not None else None)
    if name in (None, "auto") and start.full:
        name = "paper"
    if name is None and file is not None:
        return None
    pairs = PairOptions(
        image=option_values.get("csv_img_key"),
        caption=option_values.get("csv_caption_key"),
        class_captions=option_values.get("class_captions"),
    )
    modality = modality_of_name(dataset, pairs.fitting(dataset))
    return named_setting(name or "auto", dataset=dataset, modality=modality)


def _parse_values(kind: type[SweepOptions], words: list[str]) -> dict[str, Any]:
    """Return the options on the command line, by name, parsed to their declared types.

    Tyro parses them, and its boxed messages are reduced to one line.
    """
    import tyro  # imported late: only command lines need it

    fields = {name: mark_type(leaf.type) for tree in (Start, kind) for name, leaf in leaves(tree).items()}
    typed_dict: Any = TypedDict  # hides from mypy that the fields are not literal
    options_type = typed_dict("Given", fields, total=False)

    with errors_in_one_line(words):
        return dict(tyro.cli(options_type, args=words))


def _refuse_unknown_options(kind: type[SweepOptions], words: Sequence[str]) -> None:
    """Raise ConfigError for a flag that is no option, or whose option is varied by an axis."""
    leaf_by_option = {name: leaf for tree in (Start, kind) for name, leaf in leaves(tree).items()}
    valid = {"--" + name.replace("_", "-"): leaf for name, leaf in leaf_by_option.items()}
    flags = {f"--no-{name[2:]}" for name, leaf in valid.items() if leaf.type in (bool, bool | None)}
    varied = varied_by(kind)
    for word in words:
        if not word.startswith("--"):
            continue
        name = word.split("=")[0].replace("_", "-")
        option = name[2:].replace("-", "_")
        if option in varied:
            axis = varied[option]
            raise ConfigError(f"this sweep varies {name}. Set --{axis.replace('_', '-')} instead.")
        if name not in {*valid, *flags}:
            raise ConfigError(_unknown_option(name, valid))


def _unknown_option(name: str, valid: Collection[str]) -> str:
    """Return a message with the nearest option; there are too many options to list.

    >>> _unknown_option("--group-sise", ["--group-size", "--epsilon"])
    "unknown option '--group-sise'; did you mean '--group-size'? --help-all lists all options."
    """
    if line := removed_option_line(name):
        return f"{name} was {line}"
    message, _, _ = unknown_choice("option", name, [*valid, "--help", "--help-all"]).partition(" Valid: ")
    return f"{message} --help-all lists all options."


def _check_contradictions(options: SweepOptions, overrides: Collection[str]) -> None:
    """Raise ConfigError if options contradict each other."""
    if {"sampling_prob", "expected_batch_size"} <= set(overrides):
        raise ConfigError("set sampling_prob or expected_batch_size, not both")
    if not options.release.is_open and "repeats" in overrides:
        raise ConfigError(
            f"--repeats applies only to --release open; --release {options.release.mode} draws the number of "
            "trials in secret. Set --mean-trials (sealed) or --halting-prob (sealed-threshold)."
        )
    adapter_options = {"lora_alpha", "lora_targets", "lora_towers"} & set(overrides)
    trains_all = options.network.lora_rank == 0 and options.data.modality == "image-text"
    if adapter_options and trains_all and not options.always_adapts:
        names = ", ".join("--" + name.replace("_", "-") for name in sorted(adapter_options))
        raise ConfigError(
            f"{names} must be used with adapters; got --lora-rank 0, which trains every weight without them. "
            "Set --lora-rank."
        )
    options.mechanism.target_epsilon()  # raises if ε, σ and the method contradict each other
