"""Exporting a CLIP model: open_clip and peft read it by themselves, and it says whose data made it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.release.statement import RESEARCH
from tests.trainers.exporting import LORA, PAIRS, run_small_sweep, write_pairs, write_small_clip
from trainers.export.description import read_description
from trainers.export.export_folder import Statement, load_clip, load_encoder, write_model
from trainers.export.kinds import CLIP_MODELS
from trainers.export.sweep_results import read_sweep
from trainers.export.trial import main
from trainers.files.weights import read_note, read_weights
from trainers.models.clip.clip_encoder import ImageTextEncoder, build_image_text_encoder, synthetic_pairs
from trainers.models.clip.published_models import ClipConfig, build_clip, find_clip
from trainers.models.task_networks import AnyEncoder
from trainers.torchvision_import import ensure_torchvision_import

pytestmark = pytest.mark.ci  # three sweeps of pairs; exported encoders of images are tested by test_export

PRIVATE = "S4-Na1-private-r0"
WITH_LORA = ("--lora-rank", "2", "--lora-alpha", "4")
WEIGHTS = "open_clip_model.safetensors"


@dataclass
class Sweeps:
    """A storage folder with the sweeps `adapted`, `pairs` (private data, every weight) and `sealed`."""

    root: Path
    trained: dict[str, dict[str, AnyEncoder]]

    def export(self, sweep: str, to: Path) -> Path:
        trial = [] if sweep == "sealed" else ["--trial", PRIVATE]
        assert main(["--storage", str(self.root), "--to", str(to), "--sweep", sweep, *trial]) == 0
        return to


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Sweeps:
    root = tmp_path_factory.mktemp("storage")
    pairs = write_pairs(root / "pairs.parquet", 120)
    adapted = (*PAIRS, *WITH_LORA, "--no-non-private")
    of_their_own = ("--dataset", pairs, "--evaluate-on", "shapes:200", "--no-ledger", "--group-sizes", "4")
    trained = {
        "adapted": run_small_sweep(root, "adapted", *adapted, "--ema-decay", "0.5", "--learn-temperature"),
        "pairs": run_small_sweep(root, "pairs", *PAIRS, *of_their_own, "--lora-rank", "0"),
        "sealed": run_small_sweep(root, "sealed", *adapted, "--release", "sealed"),
    }
    return Sweeps(root, trained)


@pytest.fixture(scope="module")
def adapted(sweeps: Sweeps, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported model of `adapted`."""
    return sweeps.export("adapted", tmp_path_factory.mktemp("exported") / "m")


@pytest.fixture(scope="module")
def private(sweeps: Sweeps, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported model of `pairs`."""
    return sweeps.export("pairs", tmp_path_factory.mktemp("exported") / "m")


@pytest.fixture(scope="module")
def open_clip() -> Any:
    """The library, imported behind the repair that it needs beside a CPU torch."""
    ensure_torchvision_import()
    return importlib.import_module("open_clip")


@torch.no_grad()
def _embeddings(model: nn.Module) -> Tensor:
    """Of both towers, `[2n, dim]`, by the model's own methods."""
    images, tokens = synthetic_pairs(build_image_text_encoder(ClipConfig(), seed=0))
    if isinstance(model, ImageTextEncoder):
        return torch.cat([model.embed_images(images), model.embed_texts(tokens)])
    return torch.cat([model.encode_image(images, normalize=True), model.encode_text(tokens, normalize=True)])


def _same(one: nn.Module, other: nn.Module) -> bool:
    return torch.allclose(_embeddings(one), _embeddings(other), rtol=0, atol=1e-5)


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sweep", ["adapted", "pairs"])
def test_open_clip_loads_what_was_trained_and_scored(
    open_clip: Any, sweeps: Sweeps, tmp_path: Path, sweep: str
) -> None:
    folder, trained = sweeps.export(sweep, tmp_path / "m"), sweeps.trained[sweep][PRIVATE]
    assert isinstance(trained, ImageTextEncoder)
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    assert _same(model, trained)
    assert torch.equal(model.logit_scale, trained.clip.logit_scale)
    # The comparison says something: what was trained is not what the training started from.
    assert not torch.allclose(_embeddings(model), _embeddings(build_clip(trained.spec, seed=0)), atol=1e-3)


def test_the_tokenizer_that_is_named_is_the_one_of_the_training(
    open_clip: Any, sweeps: Sweeps, adapted: Path
) -> None:
    texts = ["a red circle above a star", "Ünïcode 123", "it's <b> 'x'!! &amp; 日本", "", "a " * 90, "!"]
    trained = sweeps.trained["adapted"][PRIVATE]
    assert isinstance(trained, ImageTextEncoder)
    clip = read_description(adapted).clip
    assert clip is not None
    for tokenizer in (
        open_clip.get_tokenizer(f"local-dir:{adapted}"),
        open_clip.SimpleTokenizer(
            bpe_path=str(adapted / "merges.txt.gz"), context_length=clip.context_length
        ),
    ):
        assert torch.equal(tokenizer(texts), trained.tokenizer(texts).tokens)


def test_printed_lines_run_as_they_are_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "model" #1'
    write_small_clip(folder)
    shell, *python = CLIP_MODELS.usage(folder, read_description(folder))
    assert shlex.split(shell)[shlex.split(shell).index("--model") + 1] == str(folder)
    lines = [line.partition(": ")[2] for line in python]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_open_clip_loads_the_weights_into_a_model_by_its_name(
    open_clip: Any, sweeps: Sweeps, adapted: Path, tmp_path: Path
) -> None:
    own = json.loads((adapted / "open_clip_config.json").read_text())
    (tmp_path / "by-name.json").write_text(json.dumps(own["model_cfg"]))
    open_clip.add_model_config(tmp_path)
    model = open_clip.create_model("by-name", pretrained=str(adapted / WEIGHTS)).eval()
    assert _same(model, sweeps.trained["adapted"][PRIVATE])


def test_peft_puts_the_adapters_on_the_base_model(sweeps: Sweeps, adapted: Path) -> None:
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(build_clip(find_clip(ClipConfig()), seed=0), str(adapted / "adapter"))
    assert _same(loaded, sweeps.trained["adapted"][PRIVATE])


def test_exported_model_is_loaded_as_it_was_trained(sweeps: Sweeps, private: Path) -> None:
    encoder, _ = load_clip(str(private))
    assert _same(encoder, sweeps.trained["pairs"][PRIVATE])
    assert not encoder.training
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_folder_holds_the_model_the_adapters_and_what_they_promise(adapted: Path, private: Path) -> None:
    statement = {"privacy_statement.json", "privacy_statement.md", "model.json"}
    tokenizer = {"merges.txt.gz", "tokenizer.json", "tokenizer_config.json"}
    model = {WEIGHTS, "open_clip_config.json", "README.md"} | tokenizer | statement
    assert _files(adapted) == model | {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    }
    assert _files(private) == model  # every weight was trained


def test_description_says_what_the_model_is(adapted: Path) -> None:
    found = read_description(adapted)
    assert (found.kind, found.network, found.image_shape) == ("clip", "clip-tiny", (3, 32, 32))
    assert (found.averaged, found.data, found.pixel_mean) == (True, RESEARCH, None)
    assert found.clip is not None
    assert found.clip.architecture == find_clip(ClipConfig()).architecture
    assert (found.clip.mean, found.clip.lora) == ((0.5, 0.5, 0.5), LORA)
    assert found.clip.adapter_sha256 == read_weights(adapted / "adapter/adapter_model.safetensors").sha256
    assert found.sha256 == read_weights(adapted / WEIGHTS).sha256
    assert "image_to_text_recall_at_10" in found.scores


def test_every_file_of_weights_says_whose_data_made_it(sweeps: Sweeps, private: Path, adapted: Path) -> None:
    promise = read_description(private).promise
    assert json.loads(str(read_note(private / WEIGHTS))) == {"data": "private", "promise": promise}
    for name in (WEIGHTS, "adapter/adapter_model.safetensors"):
        assert json.loads(str(read_note(adapted / name)))["data"] == RESEARCH


def test_statement_begins_with_the_models_promise(sweeps: Sweeps, private: Path) -> None:
    own = (sweeps.root / "sweeps/pairs/privacy_statement.md").read_text()
    promise = read_description(private).promise
    assert "ε = " in promise
    assert (private / "privacy_statement.md").read_text() == f"**{promise}**\n\n{own}"


def test_sealed_sweep_exports_the_model_that_it_published(
    open_clip: Any, sweeps: Sweeps, tmp_path: Path
) -> None:
    folder = sweeps.export("sealed", tmp_path / "m")
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    assert any(_same(model, each) for each in sweeps.trained["sealed"].values())
    assert read_description(folder).trial is None
    everything = "".join((folder / name).read_bytes().decode("latin-1") for name in _files(folder))
    assert not any(name in everything for name in sweeps.trained["sealed"])


def test_trained_weights_of_another_model_are_refused_and_leave_nothing(
    sweeps: Sweeps, adapted: Path, tmp_path: Path
) -> None:
    description = read_description(adapted)
    clip = dataclasses.replace(description.clip, lora_rank=3)  # type: ignore[type-var]
    state = read_sweep(sweeps.root, "adapted").trials[0].state()
    with pytest.raises(StorageError, match=r"do not fit CLIP model clip-tiny: .*lora_A"):
        write_model(
            tmp_path / "n",
            dataclasses.replace(description, clip=clip),
            state,
            Statement(values={}, page=""),
        )
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_of_a_clip_model_is_never_overwritten(sweeps: Sweeps, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(StorageError, match="never overwritten"):
        sweeps.export("adapted", tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []


def test_changed_weights_of_a_clip_model_are_not_loaded(adapted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapted, tmp_path / "m"))
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(StorageError, match="is not the exported file"):
        load_clip(folder)


def test_damaged_description_of_a_clip_model_is_refused(tmp_path: Path) -> None:
    write_small_clip(tmp_path / "m")
    path = tmp_path / "m/model.json"
    for damage in ({"mean": [0.5]}, {"lora_targets": None}, {"colours": 3}):
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {"clip": values["clip"] | damage}))
        with pytest.raises(StorageError, match="is damaged"):
            read_description(tmp_path / "m")
        path.write_text(json.dumps(values))


def test_clip_model_is_no_encoder_of_images(adapted: Path) -> None:
    with pytest.raises(ConfigError, match="load_clip"):
        load_encoder(adapted)
