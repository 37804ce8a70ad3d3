"""Plans of image-text sweeps: the fingerprint follows every option, and what fits no pairs is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError
from sweeps.service.planning import trial_configs
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Point
from sweeps.service.privacy.sweep_statement import build_statement
from tests.sweeps.support import options, plan_of
from tests.sweeps.test_plan import PAIRS_ALONE

QUICK = ("--dataset=shapes:200", "--setting=pairs-cpu", "--expected-batch-size=64", "--num-steps=2")
QUICK += ("--noise-multiplier=1", "--repeats=1", "--no-also-untrained")
LORA = ("--lora-rank=2",)
CHANGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "--lora-rank": ((), ("2",)),
    "--lora-alpha": (LORA, ("8",)),
    "--lora-targets": (LORA, ("q",)),
    "--lora-towers": (LORA, ("text",)),
    "--learn-temperature": ((), ()),
    "--per-tower-clipping": ((), ()),
    "--gradient-checkpointing": ((), ()),
    "--sentence-swap-prob": ((), ("0.2",)),
    "--word-swap-prob": ((), ("0.2",)),
    "--word-delete-prob": ((), ("0.2",)),
}
OF_CSV = {
    "--csv-separator": ",",
    "--csv-img-key": "picture",
    "--csv-caption-key": "words",
    "--csv-split-key": "split",
    "--csv-label-key": "kind",
    "--skip-corrupt": None,
}
NEEDS_A_DOWNLOAD = {"--pretrained"}


def planned(*arguments: str) -> SweepPlan:
    chosen = options(*arguments)
    return plan_of(
        "group-size", chosen, [Point(label="one", changes={"group_size": 4})], calibration_folder=None
    )


@cache
def fingerprint(*arguments: str) -> str:
    """Remembered; networks are not tried out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_configs, "_check_network", lambda *_: 1)
        return planned(*arguments).fingerprint


@pytest.mark.parametrize("option", CHANGES)
def test_fingerprint_follows_options_of_pairs(option: str) -> None:
    others, value = CHANGES[option]
    assert fingerprint(*QUICK, *others, option, *value) != fingerprint(*QUICK, *others)


def test_fingerprint_tests_cover_every_option_of_pairs() -> None:
    assert {*CHANGES, *OF_CSV, *NEEDS_A_DOWNLOAD} == PAIRS_ALONE


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 100 images with a list of their captions, separated by tabs and by commas."""
    folder, random = tmp_path_factory.mktemp("lists"), np.random.default_rng(0)
    for number in range(100):
        pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for name, separator in (("tabs", "\t"), ("commas", ",")):
        rows = [["filepath", "title", "picture", "words", "split", "kind"]]
        for number in range(100):
            part, kind = "test" if number % 5 == 0 else "train", f"kind {number % 3}"
            rows.append([*([f"{number}.png", f"number {number}"] * 2), part, kind])
        (folder / f"{name}.csv").write_text("\n".join(map(separator.join, rows)))
    return folder


@pytest.mark.parametrize("option", OF_CSV)
def test_fingerprint_follows_how_a_csv_file_is_read(option: str, lists: Path) -> None:
    csv = [f"--dataset=csv:{lists}/tabs.csv", *QUICK[1:]]
    csv += ["--num-records-public=100", "--sampling=records", "--no-non-private", "--no-ledger"]
    if option == "--csv-label-key":  # read of what is scored
        csv.append("--data-is=public")
    plain = fingerprint(*csv)
    if option == "--csv-separator":
        csv[0] = f"--dataset=csv:{lists}/commas.csv"
    value = OF_CSV[option]
    assert fingerprint(*csv, option, *([] if value is None else [value])) != plain


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--network=resnet18",), "unknown CLIP model 'resnet18'"),
        (("--network=ViT-B-32",), "Set --image-size 224"),
        (("--method=group_clip",), "no loss for pairs"),
        (("--method=byol_groups", "--num-augmentations=0"), "no loss for pairs"),
        (("--method=dp_sgd", "--learn-temperature"), "needs a method that clips groups"),
        (("--method=dp_sgd", "--per-tower-clipping"), "and a method that clips groups"),
        (("--lora-rank=2", "--lora-targets=qq"), "unknown LoRA target in the image tower"),
        (("--lora-rank=2", "--lora-towers=text", "--per-tower-clipping"), "clip.visual"),
        (("--learn-temperature", "--temperature=3"), r"must be in \[0.01, 1\].*got 3"),
        (("--lora-rank=0", "--lora-targets=q"), "got --lora-rank 0, which trains every weight"),
        (
            ("--lora-rank=0", "--lora-towers=text", "--lora-alpha=2"),
            "--lora-alpha, --lora-towers must be used with adapters",
        ),
    ],
)
def test_plan_refuses_what_pairs_cannot_be_trained_with(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        planned(*QUICK, *arguments)


@pytest.mark.parametrize(
    "arguments", [("--pretrained=openai",), ("--learn-temperature",), ("--gradient-checkpointing",)]
)
def test_plan_refuses_options_of_clip_for_images(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"applies only to (the )?(CLIP models|transformers)"):
        planned("--dataset=digits", "--noise-multiplier=1", "--repeats=1", *arguments)


def test_a_warm_start_takes_the_place_of_the_weights_that_a_setting_names() -> None:
    paper = ("--dataset=shapes:200", "--setting=paper")
    assert options(*paper).network.pretrained == "laion2b_s34b_b79k"
    assert options(*paper, "--warm-start=weights.pt").network.pretrained == "random"
    assert options(*paper, "--warm-start=weights.pt", "--pretrained=openai").network.pretrained == "openai"


def test_notes_and_statement_say_what_a_record_is() -> None:
    plan = planned(*QUICK)
    assert "One record is one image with all its captions." in plan.notes
    assert build_statement(plan, sweep="pairs").unit.startswith("one image with all its captions; a person")


def test_parquet_with_a_named_caption_column_starts_from_the_setting_of_pairs(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"image": [b"not looked at"], "name": ["a caption"]})
    pyarrow.parquet.write_table(table, tmp_path / "pairs.parquet")
    source = f"--dataset=parquet:{tmp_path}/pairs.parquet"
    assert options(source, "--csv-caption-key=name", "--no-ledger").network.name == "clip-tiny"
    assert options(source, "--no-ledger").network.name != "clip-tiny"


def test_image_text_data_start_from_their_own_setting() -> None:
    assert options("--dataset=shapes:200", "--expected-batch-size=64").network.name == "clip-tiny"
    assert options("--dataset=digits").network.name == "tiny_cnn"
