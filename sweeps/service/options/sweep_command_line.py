"""The command line of a sweep: what it starts from, what is given, and what contradicts itself."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from dpgcl_core.command_line import errors_in_one_line
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.registry import method_named
from sweeps.service.options.help import marked, show_help
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


# One of each pair stands in the other's place: given on the command line, it replaces the file's other one.
_INSTEAD = {
    "epsilon": "noise_multiplier",
    "noise_multiplier": "epsilon",
    "expected_batch_size": "sampling_prob",
    "warm_start": "pretrained",
    "pretrained": "warm_start",
}
_OF_ONE_DATASET = ("data_is", "unit_column", "num_records_public", "delta", "dataset_id", "no_ledger")
"""What a file says of its own data set, and promises for it: with another data set it is to be said anew.

That one data set is public says nothing of another one; private records would be trained on as public.
"""
_NOT_GIVEN = object()
_OF_TRAININGS = (*(each.name for each in dataclasses.fields(TrainingOptions)), "data")


def parse_options(
    kind: type[Options],
    *,
    description: str | None,
    arguments: Sequence[str] | None = None,
    announces: bool = True,
) -> Options:
    """Return a sweep's options: a named setting or a file, replaced by what the command line gives.

    Args:
      kind: the sweep's options.
      description: for `--help`.
      arguments: the command line without the program; None for this process's own.
      announces: print a line before torch is loaded, where the command line is this process's own.

    Raises:
      ConfigError: an option is unknown, or a value or a combination breaks a rule.
      SystemExit: help was asked for, and is printed.
    """
    with errors_in_flags(kind):
        words = list(sys.argv[1:] if arguments is None else arguments)
        return _parsed(kind, description, words, announces=announces and arguments is None)


def _parsed(
    kind: type[Options], description: str | None, arguments: list[str], *, announces: bool
) -> Options:
    asked = {"-h", "--help", "--help-all"} & set(arguments)
    arguments = [each for each in arguments if each not in asked]
    _refuse_unknown_options(kind, arguments)
    given = _given(kind, arguments)
    start = Start(**{name: given.pop(name) for name in leaves(Start) if name in given})
    if given.get("resume") and not asked and (options := _resumed(kind, start, given)) is not None:
        return options
    file = None if start.config is None else read_options(kind, start.config)
    options = _starting_point(kind, start, file, given)
    options = replace_options(options, **given)
    if asked:
        trees = {"start": start, "axes": options}
        show_help(trees, description, varied_by(kind), everything="--help-all" in asked)
        raise SystemExit(0)
    if announces and not options.service.is_quiet:
        print(f"{Path(sys.argv[0]).stem.replace('_', ' ')}: loading …", flush=True)
    named = frozenset({*given, *(file.values if file else ())})
    options = dataclasses.replace(options.completed(named), given=named)
    _check_contradictions(options, given)
    return options


def _resumed(kind: type[Options], start: Start, given: Mapping[str, Any]) -> Options | None:
    """The options of the sweep that is resumed, from its folder; None where it keeps none."""

    def options_of(path: Path) -> Options:
        return _completed(kind, Start(config=path), {})

    sweep = resumed_sweep(kind, given, _stated(kind, start, given), options_of)
    if sweep is None:
        return None
    addresses = dict({} if sweep.command is None else sweep.command.addresses)
    if {"ledger", "no_ledger"} & given.keys():
        addresses.pop("ledger", None)
        addresses.pop("no_ledger", None)
    options = options_of(sweep.folder / CONFIG_FILE)
    named = frozenset({*(options.given or ()), *given})
    options = replace_options(options, **{**addresses, **given, "name": sweep.name})
    return dataclasses.replace(options, given=named)


def _stated(kind: type[Options], start: Start, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a command line says, by option: what it gives, and what file, setting or preset change."""
    if start == Start():
        return dict(given)
    options, default = _completed(kind, start, given), kind()
    values = {name: (leaf.of(options), leaf.of(default)) for name, leaf in leaves(kind).items()}
    return {name: value for name, (value, before) in values.items() if name in given or value != before}


def words_of_options(options: SweepOptions, values: Mapping[str, Any]) -> list[str]:
    """Return the words by which another sweep on these data trains as these options say.

    Args:
      options: whose trainings and data are meant.
      values: of the other sweep's options, by name, which come first; ε is among them, or on an axis.
    """
    data, method = options.data.dataset, options.mechanism.method
    known = {name: leaf for name, leaf in leaves(SweepOptions).items() if leaf.path[0] in _OF_TRAININGS}
    start = _completed(SweepOptions, Start(), {"dataset": data, "method": method})
    default = leaves(SweepOptions)["method"].of(SweepOptions())
    words = ["--dataset", data, *(["--method", method] if method != default else [])]
    for name, value in values.items():
        words += _typed_words(name, value)
    settled = {"dataset", "method", "epsilon", *values, *varied_by(type(options))}
    for name, leaf in known.items():
        if name not in settled and leaf.of(options) != leaf.of(start):
            words += _typed_words(name, leaf.of(options))
    return words


def _typed_words(name: str, value: Any) -> list[str]:
    """How an option is typed.

    >>> _typed_words("group_sizes", (4, "batch")), _typed_words("non_private", False)
    (['--group-sizes', '4', 'batch'], ['--no-non-private'])
    """
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    found = value if isinstance(value, tuple) else (value,)
    return [f"--{flag}", *(f"{each:.17g}" if isinstance(each, float) else str(each) for each in found)]


def _completed(kind: type[Options], start: Start, given: Mapping[str, Any]) -> Options:
    file = None if start.config is None else read_options(kind, start.config)
    options = replace_options(_starting_point(kind, start, file, given), **given)
    named = frozenset({*given, *(file.values if file else ())})
    return dataclasses.replace(options.completed(named), given=named)


def _starting_point(
    kind: type[Options], start: Start, file: OptionsFile | None, given: Mapping[str, Any]
) -> Options:
    """The options of setting, file and preset, in this order; each replaces what is before it."""
    told = {} if file is None else dict(file.values)
    for name in given:
        told.pop(_INSTEAD.get(name, ""), None)
    preset = _preset(kind, start)
    default = kind()
    if given.get("dataset", _NOT_GIVEN) not in (_NOT_GIVEN, told.get("dataset", default.data.dataset)):
        for name in _OF_ONE_DATASET:
            told.pop(name, None)
    dataset = _dataset(given, preset(default), default, told)
    options = replace_options(default, dataset=dataset)
    setting = _setting(start, file, dataset, {**told, **given})
    if setting is not None:
        options = replace_options(
            options, **{name: leaf.of(setting) for name, leaf in leaves(TrainingOptions).items()}
        )
    options = replace_options(options, **told)
    if start.tiny or start.full:
        options = preset(options)
    elif file is None:
        options = options.of_dataset()
    names = {*given, *told}
    if given.get("warm_start") is not None:  # in place of the weights that the setting names
        options = replace_options(options, pretrained=TrainingOptions().network.pretrained)
    method_name = given.get("method", options.mechanism.method)
    if method_name == TrainingOptions().mechanism.method:  # whose keys and networks the settings have
        return options
    method = method_named(method_name)
    if "num_augmentations" not in names and not method.takes_augmented_keys:
        options = replace_options(options, num_augmentations=0)
    if "network" not in names and method.task in OWN_NETWORKS:
        options = replace_options(options, network=OWN_NETWORKS[method.task])
        if "pretrained" not in names:  # what the setting names are another network's weights
            options = replace_options(options, pretrained=TrainingOptions().network.pretrained)
    return options


def _preset(kind: type[Options], start: Start) -> Callable[[Options], Options]:
    if start.tiny:
        return kind.tiny
    return kind.full if start.full else lambda options: options


def _dataset(
    given: Mapping[str, Any], preset: SweepOptions, default: SweepOptions, told: Mapping[str, Any]
) -> str:
    """The data set of the command line, else of the preset, else of the file."""
    dataset = given.get("dataset", preset.data.dataset)
    if "dataset" not in given and preset.data.dataset == default.data.dataset:
        dataset = told.get("dataset", dataset)
    check_dataset_name(dataset)
    return str(dataset)


def _setting(
    start: Start, file: OptionsFile | None, dataset: str, given: Mapping[str, Any]
) -> TrainingOptions | None:
    """The named setting to start from; None for the plain defaults, which are those of a file."""
    name = start.setting or (file.setting if file is not None else None)
    if name in (None, "auto") and start.full:
        name = "paper"
    if name is None and file is not None:
        return None
    pairs = PairOptions(
        image=given.get("csv_img_key"),
        caption=given.get("csv_caption_key"),
        class_captions=given.get("class_captions"),
    )
    modality = modality_of_name(dataset, pairs.fitting(dataset))
    return named_setting(name or "auto", dataset=dataset, modality=modality)


def _given(kind: type[SweepOptions], arguments: list[str]) -> dict[str, Any]:
    """The options that the command line gives, by name, each of its declared type.

    Parsed by tyro, whose boxed messages become one line.
    """
    import tyro  # here, for it is needed by command lines alone

    fields = {name: marked(leaf.type) for each in (Start, kind) for name, leaf in leaves(each).items()}
    typed_dict: Any = TypedDict  # its fields are known only here
    given = typed_dict("Given", fields, total=False)

    with errors_in_one_line(arguments):
        return dict(tyro.cli(given, args=arguments))


def _refuse_unknown_options(kind: type[SweepOptions], arguments: Sequence[str]) -> None:
    known = {name: leaf for each in (Start, kind) for name, leaf in leaves(each).items()}
    valid = {"--" + name.replace("_", "-"): leaf for name, leaf in known.items()}
    flags = {f"--no-{name[2:]}" for name, leaf in valid.items() if leaf.type in (bool, bool | None)}
    varied = varied_by(kind)
    for typed in arguments:
        if not typed.startswith("--"):
            continue
        name = typed.split("=")[0].replace("_", "-")
        option = name[2:].replace("-", "_")
        if option in varied:
            axis = varied[option]
            raise ConfigError(f"this sweep varies that: give --{axis.replace('_', '-')}, not {name}")
        if name not in {*valid, *flags}:
            raise ConfigError(_unknown_option(name, valid))


def _unknown_option(name: str, valid: Collection[str]) -> str:
    """Tell the nearest option; there are too many to list.

    >>> _unknown_option("--group-sise", ["--group-size", "--epsilon"])
    "unknown option '--group-sise'; did you mean '--group-size'? Valid: what --help-all lists"
    """
    if line := removed_option_line(name):
        return f"{name} is of an earlier version, {line}"
    told, _, _ = unknown_choice("option", name, [*valid, "--help", "--help-all"]).partition(" Valid: ")
    return f"{told} Valid: what --help-all lists"


def _check_contradictions(options: SweepOptions, given: Collection[str]) -> None:
    """Refuse options that contradict each other, each of them right by itself."""
    if {"sampling_prob", "expected_batch_size"} <= set(given):
        raise ConfigError("give sampling_prob or expected_batch_size, not both")
    if not options.release.is_open and "repeats" in given:
        raise ConfigError(
            f"repeats are a list of trials that anybody can see, and --release {options.release.mode} draws "
            "their number in secret; give --mean-trials, or --halting-prob with a threshold"
        )
    of_adapters = {"lora_alpha", "lora_targets", "lora_towers"} & set(given)
    trains_all = options.network.lora_rank == 0 and options.data.modality == "image-text"
    if of_adapters and trains_all and not options.always_adapts:
        names = ", ".join("--" + name.replace("_", "-") for name in sorted(of_adapters))
        raise ConfigError(
            f"{names} tell of adapters, and lora_rank 0 trains every weight without any: give --lora-rank, "
            "too"
        )
    options.mechanism.target_epsilon()
