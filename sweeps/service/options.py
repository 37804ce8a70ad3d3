"""The options every sweep has, typed to the command line; a sweep adds its own axes to them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar, get_type_hints

from dpgcl_core.errors import ConfigError, StrictParser, unknown_choice
from dpgcl_core.mechanism.registry import method_named
from sweeps.service.release import check_release
from sweeps.service.scores import default_score
from trainers.config.presets import named_setting
from trainers.config.settings import Setting
from trainers.data.dataset import Modality
from trainers.data.loading import PairOptions, check_dataset_name, is_builtin_name, modality_of_name


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Setting):
    """Options of a sweep besides its axes.

    Attributes:
      always_adapts: whether every trial has adapters, of a rank that the sweep chooses where none is given.
    """

    always_adapts: ClassVar[bool] = False

    dataset: str = "digits"
    """digits, fashion-mnist, cifar10, eurosat, shapes; your own: {npz,parquet,folder,csv,webdataset}:PATH."""
    setting: str = "auto"
    """Named defaults of all training options: auto (CPU-sized for the data set), cpu, paper, …"""
    data_is: Literal["auto", "public", "private"] = "auto"
    """Whether the training data are public; auto: the built-in benchmarks are, your own are not."""
    evaluate_on: str | None = None
    """A public data set to score on, labelled or with captions; needed when the training data are private."""
    probe_datasets: tuple[str, ...] = ()
    """Other public labelled data sets whose frozen features are scored, too: resized, in grey or colour."""
    unit_column: str | None = None
    """Column of your own data that names the privacy unit: all rows of one are one record."""
    csv_separator: str = "\t"
    """What stands between the columns of csv:PATH; a tab unless given, as in open_clip."""
    csv_img_key: str | None = None
    """Column of csv or parquet with the images' paths (parquet: or bytes): filepath (parquet: or image)."""
    csv_caption_key: str | None = None
    """Column of csv or parquet with captions: title or caption unless given."""
    csv_split_key: str | None = None
    """Column of csv or parquet that says train or test; without it all rows are training rows."""
    csv_label_key: str | None = None
    """Column of csv or parquet with captions that holds the images' classes, for scores by label."""
    skip_corrupt: bool = False
    """Drop image-text rows without a readable image or a caption, instead of refusing the data."""
    image_size: int | None = None
    """Resize images to this square, in pixels."""
    test_fraction: float = 0.2
    """Share held out for scoring where public data have no test split of their own; by record id."""
    repeats: int = 3
    """Trainings per point, each with its own public seed."""
    seed: int = 0
    """Public seed of the first repeat: initialisation, views, evaluation subsets. Never of noise."""
    storage: Path | None = None
    """Absolute folder for results, MLflow database, calibrations and checkpoints ($DPGCL_STORAGE)."""
    name: str | None = None
    """Name of the sweep; made from question, data set and time unless given."""
    resume: bool = False
    """Continue the named sweep, or the latest one of the same configuration."""
    tracking_uri: str | None = None
    """MLflow server ($MLFLOW_TRACKING_URI); a SQLite database under the storage folder unless given."""
    gpus_per_worker: float = 0.0
    """GPUs of one worker; a fraction lets several trials share one."""
    max_concurrent_trials: int | None = None
    """Trainings at once; as many as the cluster's CPUs (and GPUs) hold unless given."""
    max_restarts: int = 2
    """Times a crashed training is restarted from its checkpoint; every restart is charged."""
    release: Literal["open", "sealed", "sealed-threshold"] = "open"
    """What leaves: every trial (open), or one trial out of a secret number (sealed, sealed-threshold)."""
    search: str = "auto"
    """grid (open), independent (sealed: random draws from the grid's settings), or auto."""
    mean_trials: float = 10.0
    """Sealed: mean of the secret number of trials."""
    eta: float = 1.0
    """Sealed: shape of the law of that number; 1 geometric, 0 logarithmic."""
    bound: str = "profile"
    """Sealed: the theorem that bounds the cost: profile, pointwise or ps22."""
    halting_prob: float = 0.1
    """Sealed-threshold: probability to halt after each miss; the number of trials has mean 1 over it."""
    min_score: float | None = None
    """Sealed-threshold: the public score that a trial must reach."""
    select_by: str = "auto"
    """Sealed: the public score that the released trial is chosen by; auto: k-NN accuracy, of pairs recall."""
    ledger: str | None = None
    """Budget ledger ($DPGCL_LEDGER): a path, or a SQLite or PostgreSQL URL; every step is charged to it."""
    dataset_id: str | None = None
    """The data set's id in the ledger."""
    no_ledger: bool = False
    """Train on private data with no budget ledger; the privacy statement will say so."""
    dry_run: bool = False
    """Print the trials, their ε and an estimate of time, and stop."""
    tiny: bool = False
    """Two small trials, to see that everything works."""
    full: bool = False
    """The paper's grid at the paper's setting (a GPU is advised)."""

    def __post_init__(self) -> None:
        for name in (self.dataset, *self.probe_datasets):
            check_dataset_name(name)
        _check_pair_options(self)
        for name, least in (("repeats", 1), ("max_restarts", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction must be in (0, 1); got {self.test_fraction}")
        if not 0 <= self.gpus_per_worker < math.inf:
            raise ConfigError(f"gpus_per_worker must be finite and not negative; got {self.gpus_per_worker}")
        if self.max_concurrent_trials is not None and self.max_concurrent_trials < 1:
            raise ConfigError(f"max_concurrent_trials must be at least 1; got {self.max_concurrent_trials}")
        if self.tiny and self.full:
            raise ConfigError("give tiny or full, not both")
        if self.select_by == "auto" and self.release != "open":
            object.__setattr__(self, "select_by", default_score(self.modality))
        check_release(self)

    @property
    def data_are_private(self) -> bool:
        """Whether the release policy for private data applies."""
        return self.data_is == "private" or (self.data_is == "auto" and not is_builtin_name(self.dataset))

    @property
    def modality(self) -> Modality:
        """What a record is, as far as it shows before the data are loaded."""
        return modality_of_name(self.dataset, self.pairs.fitting(self.dataset))

    @property
    def pairs(self) -> PairOptions:
        """How images with captions are read, of whichever data set has them."""
        given = {field: getattr(self, option) for field, option in _PAIR_OPTIONS.items()}
        if given["separator"] == "\\t":  # as most shells pass it on
            given["separator"] = "\t"
        return PairOptions(**given)

    @property
    def pairs_of_training(self) -> PairOptions:
        """How images with captions are read of the training data: labels only where these are scored, too."""
        fitting = self.pairs.fitting(self.dataset)
        scored = self.evaluate_on is None and not self.data_are_private
        return fitting if scored else dataclasses.replace(fitting, label=None)

    def training_setting(self) -> Setting:
        """Returns the training knobs alone."""
        return Setting(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Setting)})


_PAIR_OPTIONS = {
    "image": "csv_img_key",
    "caption": "csv_caption_key",
    "separator": "csv_separator",
    "split": "csv_split_key",
    "label": "csv_label_key",
    "skip_corrupt": "skip_corrupt",
}


def _check_pair_options(options: SweepOptions) -> None:
    """Refuses what means nothing for any of the data sets that are named."""
    given = options.pairs
    scored = [given.fitting(name) for name in (options.evaluate_on or "", *options.probe_datasets)]
    meant = {field for pairs in (options.pairs_of_training, *scored) for field in pairs.given}
    unused = [_PAIR_OPTIONS[field] for field in given.given if field not in meant]
    if "csv_label_key" in unused:
        raise ConfigError(
            "csv_label_key names the classes of public pairs that are scored, in csv:PATH or parquet:PATH; "
            f"here {options.evaluate_on or 'nothing'} is scored, and labels of training data are not read: "
            "leave it out"
        )
    if unused:
        raise ConfigError(
            f"{', '.join(unused)} must be left out: they tell how csv:PATH is read (all but csv_separator "
            "also parquet:PATH, skip_corrupt also webdataset:PATH), and mean nothing for "
            f"{options.dataset.partition(':')[0]}"
        )


Options = TypeVar("Options", bound=SweepOptions)


def parse_options(
    kind: type[Options],
    *,
    description: str,
    tiny: dict[str, object],
    full: dict[str, object],
    by_dataset: Mapping[str, dict[str, object]],
    arguments: Sequence[str] | None = None,
) -> Options:
    """Returns a sweep's options: the named setting's values, replaced by what the command line gives.

    Args:
      kind: the sweep's options.
      description: for `--help`.
      tiny, full: field values that `--tiny` and `--full` stand for.
      by_dataset: field values for a data set when neither is given.
      arguments: the command line without the program; None for this process's own.

    Raises:
      ConfigError: an option is unknown, or a value or a combination breaks a rule.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _refuse_unknown_options(kind, arguments)
    first = StrictParser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset")
    first.add_argument("--setting", default="auto")
    first.add_argument("--method", default=Setting.method)
    for option in ("--csv-img-key", "--csv-caption-key", "--warm-start"):
        first.add_argument(option)
    first.add_argument("--tiny", action="store_true")
    first.add_argument("--full", action="store_true")
    chosen, _ = first.parse_known_args(arguments)
    preset: dict[str, object] = dict(tiny) if chosen.tiny else dict(full) if chosen.full else {}
    dataset = str(chosen.dataset or preset.get("dataset", kind.dataset))
    check_dataset_name(dataset)
    preset = preset or by_dataset.get(dataset, {})
    setting_name = "paper" if chosen.full and chosen.setting == "auto" else chosen.setting
    pairs = PairOptions(image=chosen.csv_img_key, caption=chosen.csv_caption_key).fitting(dataset)
    modality = modality_of_name(dataset, pairs)
    setting = named_setting(setting_name, dataset=dataset, modality=modality)
    values = {f.name: getattr(setting, f.name) for f in dataclasses.fields(Setting)} | preset
    if chosen.warm_start not in (None, "None"):  # in place of the weights that the setting names
        values["pretrained"] = Setting.pretrained
    if not method_named(chosen.method).takes_augmented_keys:
        values["num_augmentations"] = 0
    options = _typed(kind, kind(**values), description, arguments)
    _refuse_contradictions(options, arguments)
    return options


def _typed(kind: type[Options], default: Options, description: str, arguments: list[str]) -> Options:
    """Returns the options by tyro, whose boxed messages become one line."""
    import tyro  # here, for it is needed by command lines alone

    said = io.StringIO()
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "10000"  # no line is broken
    if {"-h", "--help"} & set(arguments):
        os.environ["COLUMNS"] = columns or str(shutil.get_terminal_size().columns)
    try:
        with contextlib.redirect_stderr(said):
            shown = _retyped(kind, varied=tyro.conf.Suppress, flag=tyro.conf.DisallowNone)
            values = tyro.cli(shown, description=description, default=shown(**vars(default)), args=arguments)
        return kind(**vars(values))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(_first_part(said.getvalue())) from None
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _retyped(kind: type[Options], *, varied: object, flag: object) -> type[Options]:
    """Returns options with marks for tyro.

    Those that the sweep varies are marked `varied`: with group_sizes, `--help` shows no group_size. Those
    that are true, false or left to a rule are marked `flag`: they are typed `--name` and `--no-name`.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    types = get_type_hints(kind)
    marks = {name: varied for name in names if f"{name}s" in names}
    marks |= {name: flag for name in names if types[name] == bool | None}
    fields = [
        (each.name, Annotated[types[each.name], marks[each.name]], dataclasses.field(default=each.default))
        for each in dataclasses.fields(kind)
        if each.name in marks
    ]
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True)


def _first_part(box: str) -> str:
    """The first section of a box, in one line.

    >>> _first_part("╭ Error ─╮\\n│ Error parsing Sweep: a ≥ 1 │\\n│ ───── │\\n│ More help. │\\n╰───╯")
    'a ≥ 1'
    """
    lines = [line.strip("│ \n") for line in box.splitlines() if line.startswith("│")]
    section = itertools.takewhile(lambda line: not line.startswith("──"), lines)
    text = " ".join(line for line in section if line) or box.strip()
    return re.sub(r"^Error parsing [A-Z]\w*: ", "", text)


def _refuse_unknown_options(kind: type[SweepOptions], arguments: Sequence[str]) -> None:
    valid = {"--" + f.name.replace("_", "-"): f for f in dataclasses.fields(kind)}
    flags = {f"--no-{name[2:]}" for name, field in valid.items() if "bool" in str(field.type)}
    for name in _names(arguments):
        if name not in {*valid, *flags, "--help"}:
            raise ConfigError(unknown_choice("option", name, valid))
        if f"{name}s" in valid:
            raise ConfigError(f"this sweep varies {name[2:].replace('-', '_')}: give {name}s, not {name}")


def _names(arguments: Sequence[str]) -> list[str]:
    """The options among the arguments, spelled with dashes."""
    return [a.split("=")[0].replace("_", "-") for a in arguments if a.startswith("--")]


def _refuse_contradictions(options: SweepOptions, arguments: Sequence[str]) -> None:
    if {"--sampling-prob", "--expected-batch-size"} <= set(_names(arguments)):
        raise ConfigError("give sampling_prob or expected_batch_size, not both")
    if options.release != "open" and "--repeats" in _names(arguments):
        raise ConfigError(
            f"repeats are a list of trials that anybody can see, and --release {options.release} draws their "
            "number in secret; give --mean-trials, or --halting-prob with a threshold"
        )
    _refuse_unused_adapters(options, arguments)
    options.target_epsilon()


def _refuse_unused_adapters(options: SweepOptions, arguments: Sequence[str]) -> None:
    of_adapters = {"--lora-alpha", "--lora-targets", "--lora-towers"} & set(_names(arguments))
    has_none = options.lora_rank == 0 and options.modality == "image-text" and not options.always_adapts
    if of_adapters and has_none:
        raise ConfigError(
            f"{', '.join(sorted(of_adapters))} tell of adapters, and lora_rank 0 trains every weight "
            "without any: give --lora-rank, too"
        )
