"""The twelve command lines whose behaviour is recorded, and what their folders hold before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

Command = tuple[str, ...]
STORAGE = ("--storage", "{folder}/storage")
LEDGER = ("--ledger", "{folder}/ledger.db")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command line, with those that belong to it before and after.

    Attributes:
      name: of the case and of the file that keeps what it did.
      commands: in this order; the first word is a script, or `-m`; `{folder}` is an empty folder.
      prepare: writes what the commands read into the folder.
      marker: who runs it: `make test`, or `.ci/run` (`ci`) where it takes ten seconds, or `make test-long`.
    """

    name: str
    commands: tuple[Command, ...]
    prepare: Callable[[Path], None] = lambda _: None
    marker: Literal["", "ci", "long"] = ""


def write_images(folder: Path) -> None:
    """Write private and public images, 8×8 and labelled."""
    for name, num_records, seed in (("private", 400, 7), ("public", 200, 8)):
        generator = np.random.default_rng(seed)
        images = generator.integers(0, 256, (num_records, 8, 8), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=np.arange(num_records) % 3)


def _cap(epsilon: str) -> Command:
    new = ("--create", "--dataset", "scans", "--epsilon", epsilon, "--delta", "1e-4")
    return ("-m", "dpgcl_core.ledger", "cap", *LEDGER, *new, "--num-records-public", "400")


_PRIVATE = ("sweeps/group_size.py", "--tiny", "--dataset", "npz:{folder}/private.npz")
_PRIVATE += ("--evaluate-on", "npz:{folder}/public.npz", "--num-records-public", "400", "--delta", "1e-4")
_PRIVATE += ("--dataset-id", "scans", "--group-sizes", "2", "4", *LEDGER, *STORAGE)
_STEPS = (
    "--sampling-prob",
    "0.034",
    "--noise-multiplier",
    "0.97",
    "--num-steps",
    "1200",
    "--delta",
    "1.5e-6",
)

CASES = (
    Case(
        name="group_size_tiny",
        commands=(
            ("sweeps/group_size.py", "--tiny", "--name", "recorded", *STORAGE),
            ("-m", "trainers.export", "--sweep", "recorded", "--to", "{folder}/exported", *STORAGE),
            ("-m", "trainers.export", "--sweep", "recorded", "--to", "{folder}/exported", *STORAGE),
        ),
        marker="long",
    ),
    Case(
        name="group_size_dry_run",
        commands=(
            (
                *("sweeps/group_size.py", "--dry-run", "--epsilon", "3", "--group-sizes", "4", "batch"),
                *("--num-augmentations-grid", "0", "2", "--repeats", "2", "--clipping", "automatic"),
                *("--ema-decay", "0.9", "--warmup-steps", "5", "--num-steps", "40"),
                *("--expected-batch-size", "100", *STORAGE),
            ),
        ),
    ),
    Case(
        name="methods_dry_run",
        commands=(
            (
                *("sweeps/methods.py", "--dry-run", "--tiny", "--methods", "dp_gcl", "dp_clip", "dp_sgd"),
                *("group_clip", "logit_dp", "dpcl_simclr", *STORAGE),
            ),
        ),
        marker="ci",
    ),
    Case(
        name="search_dry_run",
        commands=(("sweeps/search.py", "--dry-run", "--tiny", "--epsilon-range", "1", "10", *STORAGE),),
        marker="ci",
    ),
    Case(
        name="sealed_dry_run",
        commands=tuple(
            ("sweeps/group_size.py", "--dry-run", "--tiny", "--release", *release, *STORAGE)
            for release in (
                ("sealed", "--mean-trials", "10"),
                ("sealed", "--bound", "ps22", "--eta", "0"),
                ("sealed-threshold", "--min-score", "0.8", "--halting-prob", "0.1"),
            )
        ),
        marker="ci",
    ),
    Case(
        name="private_sweep_with_ledger",
        commands=(
            _cap("60"),
            (*_PRIVATE, "--name", "recorded", "--score-on-held-out", "0.1", "--score-noise-multiplier", "20"),
            ("-m", "dpgcl_core.ledger", "show", *LEDGER),
            (
                *("-m", "dpgcl_core.ledger", "verify", *LEDGER, "--against"),
                "{folder}/storage/sweeps/recorded/privacy_statement.json",
            ),
        ),
        prepare=write_images,
        marker="ci",
    ),
    Case(
        name="refused_by_ledger",
        commands=(_cap("8"), _PRIVATE, ("-m", "dpgcl_core.ledger", "show", *LEDGER)),
        prepare=write_images,
        marker="ci",
    ),
    Case(
        name="pairs_dry_run",
        commands=(
            ("sweeps/group_size.py", "--dry-run", "--tiny", "--dataset", "shapes:400", *STORAGE),
            (
                *("sweeps/lora_layers.py", "--dry-run", "--tiny", "--dataset", "shapes:400", *STORAGE),
                *("--learn-temperature", "--per-tower-clipping"),
            ),
        ),
        marker="ci",
    ),
    Case(
        name="bad_options",
        commands=(
            ("sweeps/group_size.py", "--group-sise", "3"),
            ("sweeps/group_size.py", "--group-sizes", "0", *STORAGE),
            ("sweeps/temperature.py", "--epsilon", "-1", *STORAGE),
        ),
        marker="ci",
    ),
    Case(
        name="calculator",
        commands=(
            ("-m", "dpgcl_core.calculator", "epsilon", *_STEPS, "--json"),
            ("-m", "dpgcl_core.calculator", "epsilon", *_STEPS, "--accountant", "rdp"),
            (
                *("-m", "dpgcl_core.calculator", "noise", "--sampling-prob", "0.01", "--num-steps", "1000"),
                *("--delta", "1e-5", "--epsilon", "2", "--json"),
            ),
            (
                *("-m", "dpgcl_core.calculator", "tuning", "--mode", "sealed", "--law", "tnb", "--eta", "1"),
                *("--mean-trials", "10", "--sampling-prob", "0.01", "--noise-multiplier", "1"),
                *("--num-steps", "1000", "--delta", "1e-5", "--json"),
            ),
            ("-m", "dpgcl_core.calculator", "epsilon", "--sampling-prob", "2"),
        ),
        marker="ci",
    ),
    Case(
        name="ledger_commands",
        commands=(
            _cap("8"),
            ("-m", "dpgcl_core.ledger", "cap", *LEDGER, "--dataset", "scans", "--epsilon", "9"),
            ("-m", "dpgcl_core.ledger", "cap", *LEDGER, "--dataset", "scans", "--epsilon", "6"),
            ("-m", "dpgcl_core.ledger", "show", *LEDGER),
            ("-m", "dpgcl_core.ledger", "export", *LEDGER, "--output", "{folder}/rows.jsonl"),
            ("-m", "dpgcl_core.ledger", "verify", "--export", "{folder}/rows.jsonl"),
            ("-m", "dpgcl_core.ledger", "verify", "--ledger", "{folder}/none.db"),
        ),
        marker="ci",
    ),
    Case(
        name="bad_input",
        commands=(
            ("sweeps/group_size.py", "--dataset", "npz:{folder}/none.npz", "--no-ledger", *STORAGE),
            (
                "sweeps/group_size.py",
                "--dataset",
                "npz:{folder}/private.npz",
                "--seeded-non-private",
                *STORAGE,
            ),
            ("-m", "trainers.export", "--sweep", "none", *STORAGE),
            (
                "-m",
                "trainers.embed",
                "--model",
                "{folder}/none",
                "--images",
                "digits",
                "--to",
                "{folder}/e.npz",
            ),
            ("-m", "dashboards", "figure", "--question", "none"),
        ),
        prepare=write_images,
        marker="ci",
    ),
)
