"""Embedding in parts: the output is that of all images at once, and an interrupted run is continued."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from numpy.typing import NDArray
from PIL import Image

from dpgcl_core.errors import StorageError
from tests.trainers.exporting import write_pairs, write_small_clip, write_small_model
from trainers.data.loading import load_dataset
from trainers.embed import embed_images as commands
from trainers.embed import embed_pairs
from trainers.embed.command import main
from trainers.embed.embed_images import embed_images
from trainers.embed.embed_pairs import embed_texts, embed_with_image_tower
from trainers.export.export_folder import load_clip, load_encoder

NUM_IMAGES, ROWS_PER_PART = 10, 4
NUM_PARTS = 3


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of four rows."""
    monkeypatch.setattr(embed_pairs, "ROWS_PER_PART", ROWS_PER_PART)


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """New files can be read by everybody."""
    umask = os.umask(0o022)
    yield
    os.umask(umask)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An exported encoder of grey images of 8 × 8 pixels."""
    write_small_model(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported CLIP model."""
    folder = tmp_path_factory.mktemp("exported") / "clip"
    write_small_clip(folder)
    return folder


def _pixels(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with ten grey images in two classes."""
    for number in range(NUM_IMAGES):
        place = tmp_path / "images" / ("cats" if number % 2 else "dogs")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_pixels(number)).save(place / f"{number}.png")
    return tmp_path / "images"


def _embed(model: Path, to: Path, *more: str) -> dict[str, Any]:
    """Runs the command and returns the columns or arrays."""
    assert main(["--model", str(model), "--to", str(to), "--device", "cpu", *more]) == 0
    assert not _unfinished(to).exists()
    if to.suffix == ".npz":
        with np.load(to, allow_pickle=False) as archive:
            return dict(archive)
    return dict(pq.read_table(to).to_pydict())


def _unfinished(to: Path) -> Path:
    return to.with_name(f".{to.name}.unfinished")


def _parts(to: Path) -> list[Path]:
    return sorted(_unfinished(to).glob("*.parquet"))


def _pass(patch: pytest.MonkeyPatch, num_calls: float = np.inf) -> list[int]:
    """Counts the images of each part that is computed from now on; the call after `num_calls` interrupts."""
    calls: list[int] = []

    def counted(encoder: Any, images: Any, **options: Any) -> Any:
        if len(calls) >= num_calls:
            raise KeyboardInterrupt
        calls.append(images.shape[0])
        return embed_images(encoder, images, **options)

    patch.setattr(commands, "embed_images", counted)
    return calls


def _interrupt(patch: pytest.MonkeyPatch, num_calls: int, *arguments: Any) -> None:
    _pass(patch, num_calls)
    with pytest.raises(KeyboardInterrupt):
        _embed(*arguments)


@pytest.mark.parametrize("features", ["backbone", "projection"])
@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_parts_are_the_embeddings_of_all_images_at_once(
    tmp_path: Path, model: Path, images: Path, features: str, suffix: str
) -> None:
    more = ("--images", f"folder:{images}", "--features", features, "--batch-size", "2")
    found = _embed(model, tmp_path / f"e{suffix}", *more)
    dataset = load_dataset(f"folder:{images}")
    expected = embed_images(
        load_encoder(model)[0], np.asarray(dataset.train.images), features=features, batch_size=2
    )
    names = ("ids", "labels", "embeddings") if suffix == ".npz" else ("id", "label", "embedding")
    assert [list(found[name]) for name in names[:2]] == [
        list(dataset.names or ()),
        [name.split("/")[0] for name in map(str, dataset.names or ())],
    ]
    assert np.array_equal(np.array(found[names[2]], np.float32), expected)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_parts_of_pairs_are_the_embeddings_of_all_pairs_at_once(
    tmp_path: Path, clip: Path, suffix: str
) -> None:
    source = write_pairs(tmp_path / "pairs.parquet", NUM_IMAGES)
    found = _embed(clip, tmp_path / f"e{suffix}", "--images", source, "--batch-size", "2")
    encoder, records = load_clip(clip)[0], load_dataset(source, image_size=32).train
    captions = [f"{text} {number}" for number in range(NUM_IMAGES) for text in ("a thing of", "number")]
    embeddings = {
        "image_embedding": embed_with_image_tower(encoder, records.images, 2),
        "text_embedding": embed_texts(encoder, captions, 2)[0],
    }
    ids, owners = list(range(NUM_IMAGES)), np.repeat(np.arange(NUM_IMAGES), 2).tolist()
    if suffix == ".npz":
        expected = {f"{name}s": values.tolist() for name, values in embeddings.items()}
        expected |= {"ids": ids, "text_owners": owners}
        found.pop("about")
        found = {name: values.tolist() for name, values in found.items()}
    else:
        expected = {
            "id": ids + owners,
            "image_embedding": embeddings["image_embedding"].tolist() + [None] * len(owners),
            "text_owner": [None] * len(ids) + owners,
            "text_embedding": [None] * len(ids) + embeddings["text_embedding"].tolist(),
        }
    assert found == expected


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_parts_of_captions_are_the_embeddings_of_all_captions_at_once(
    tmp_path: Path, clip: Path, suffix: str
) -> None:
    captions = [f"number {number}" for number in range(9)]
    (tmp_path / "a.txt").write_text("\n".join(captions))
    found = _embed(clip, tmp_path / f"e{suffix}", "--texts", str(tmp_path / "a.txt"), "--batch-size", "2")
    expected = embed_texts(load_clip(clip)[0], captions, 2)[0]
    assert np.array_equal(np.array(found[f"text_embedding{'s' * (suffix == '.npz')}"], np.float32), expected)


def test_images_that_stay_in_their_files_have_the_same_embeddings(
    tmp_path: Path, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--images", f"folder:{images}")
    found = _embed(model, tmp_path / "a.parquet", *more)
    monkeypatch.setattr("trainers.data.image_index.free_memory", lambda: 0)
    for number, folder in enumerate((tmp_path / ".dpgcl-index", tmp_path / "elsewhere")):
        option = ("--index-folder", str(folder)) if number else ()
        assert _embed(model, tmp_path / f"{number}.parquet", *more, *option) == found
        assert list(folder.rglob("*.arrow"))


def test_parquet_has_a_group_of_rows_for_each_part(tmp_path: Path, model: Path, images: Path) -> None:
    _embed(model, tmp_path / "e.parquet", "--images", f"folder:{images}")
    metadata = pq.read_metadata(tmp_path / "e.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [4, 4, 2]


def test_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path,
    model: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ("--images", f"folder:{images}")
    _embed(model, tmp_path / "whole.parquet", *more)
    _interrupt(monkeypatch, 2, model, tmp_path / "e.parquet", *more)
    assert not (tmp_path / "e.parquet").exists()
    capsys.readouterr()
    calls = _pass(monkeypatch)
    _embed(model, tmp_path / "e.parquet", *more, "--batch-size", "3")
    assert calls == [NUM_IMAGES - 2 * ROWS_PER_PART]
    assert "is continued" in capsys.readouterr().err
    assert (tmp_path / "e.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_cut_captions_of_finished_parts_stay_counted(
    tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(["word " * 200] * 3 + ["short"] * 5))
    more = ("--texts", str(tmp_path / "a.txt"))
    with monkeypatch.context() as patch:
        patch.setattr(commands, "write_embeddings", _raise(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _embed(clip, tmp_path / "e.parquet", *more)
    assert len(_parts(tmp_path / "e.parquet")) == 2
    monkeypatch.setattr(commands, "embed_texts", _raise(AssertionError))
    _embed(clip, tmp_path / "e.parquet", *more)
    assert "3 of 8 captions" in capsys.readouterr().err


def _raise(error: type[BaseException]) -> Callable[..., Any]:
    def raise_error(*_: Any, **__: Any) -> Any:
        raise error

    return raise_error


KILLED = """
    import os, signal, sys
    from trainers.embed import command, embed_images as commands, embed_pairs, embedding_files
    embed_pairs.ROWS_PER_PART = 4
    place, number = sys.argv[1], int(sys.argv[2])
    module = commands if place == "embed_images" else embedding_files
    original, calls = getattr(module, place), []
    def kill(*arguments, **options):
        calls.append(0)
        if len(calls) > number:
            if place == "_write_parquet":
                original(*arguments, **options)  # the whole file, which is not yet in its place
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    setattr(module, place, kill)
    command.main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("place", "num_calls", "num_left"), [("embed_images", 1, 2), ("_write_parquet", 0, 0)]
)
@pytest.mark.usefixtures("usual_umask")
def test_killed_run_goes_on_and_leaves_nothing(
    tmp_path: Path,
    model: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    num_calls: int,
    num_left: int,
) -> None:
    to = tmp_path / "out" / "e.parquet"
    to.parent.mkdir()
    to.parent.chmod(0o750)
    more = ("--images", f"folder:{images}")
    words = [place, str(num_calls), "--model", str(model), "--to", str(to), "--device", "cpu", *more]
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), *words], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in to.parent.iterdir()] == [_unfinished(to).name]
    assert stat.S_IMODE(_unfinished(to).stat().st_mode) == 0o700
    assert {stat.S_IMODE(part.stat().st_mode) for part in _parts(to)} == {0o600}
    calls = _pass(monkeypatch)
    found = _embed(model, to, *more)
    assert (len(calls), len(found["id"])) == (num_left, NUM_IMAGES)
    assert [path.name for path in to.parent.iterdir()] == [to.name]
    assert stat.S_IMODE(to.stat().st_mode) == 0o640  # as its folder


@pytest.mark.usefixtures("usual_umask")
def test_parts_are_private_in_a_folder_that_was_opened(
    tmp_path: Path, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, more = tmp_path / "e.parquet", ("--images", f"folder:{images}")
    _interrupt(monkeypatch, 1, model, to, *more)
    _unfinished(to).chmod(0o755)
    _interrupt(monkeypatch, 1, model, to, *more)
    assert [stat.S_IMODE(part.stat().st_mode) for part in _parts(to)] == [0o600, 0o600]


def _change_model(model: Path, _: Path) -> None:
    weights = load_encoder(model)[0].state_dict()
    for file in model.iterdir():
        file.unlink()
    model.rmdir()
    write_small_model(model, state={name: 2 * values for name, values in weights.items()})


def _change_pixels(_: Path, images: Path) -> None:
    Image.fromarray(_pixels(99)).save(images / "cats" / "1.png")


def _remove_image(_: Path, images: Path) -> None:
    (images / "cats" / "1.png").unlink()


def _rename_image(_: Path, images: Path) -> None:
    (images / "cats" / "1.png").rename(images / "cats" / "01.png")


@pytest.mark.parametrize("change", [_change_model, _change_pixels, _remove_image, _rename_image])
def test_other_model_or_data_start_anew(
    tmp_path: Path,
    model: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path, Path], None],
) -> None:
    more = ("--images", f"folder:{images}")
    _interrupt(monkeypatch, 2, model, tmp_path / "e.parquet", *more)
    change(model, images)
    capsys.readouterr()
    calls = _pass(monkeypatch)
    found = _embed(model, tmp_path / "e.parquet", *more)
    assert len(calls) == NUM_PARTS
    assert "model or data have changed" in capsys.readouterr().err
    assert found == _embed(model, tmp_path / "whole.parquet", *more)


def test_other_features_start_anew(
    tmp_path: Path, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--images", f"folder:{images}")
    _interrupt(monkeypatch, 2, model, tmp_path / "e.parquet", *more)
    calls = _pass(monkeypatch)
    _embed(model, tmp_path / "e.parquet", *more, "--features", "projection")
    assert len(calls) == NUM_PARTS


def test_unchanged_run_says_nothing_of_parts(
    tmp_path: Path, model: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _embed(model, tmp_path / "e.parquet", "--images", f"folder:{images}")
    assert "note" not in capsys.readouterr().err


@pytest.mark.usefixtures("capsys")  # which keeps what is printed out of files
def test_full_disk_is_reported_and_finished_parts_stay(
    tmp_path: Path, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, more = tmp_path / "e.parquet", ("--images", f"folder:{images}")
    _interrupt(monkeypatch, 1, model, to, *more)
    _pass(monkeypatch)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"e\.parquet cannot be written: File too large"):
            _embed(model, to, *more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(_parts(to)) == 1
    assert {path.name for path in _unfinished(to).iterdir()} == {"lock", _parts(to)[0].name}
    assert not to.exists()


def test_folder_that_cannot_be_written_is_reported(tmp_path: Path, model: Path, images: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"e\.parquet cannot be written"):
        _embed(model, tmp_path / "file" / "e.parquet", "--images", f"folder:{images}")


def test_failure_before_the_first_part_leaves_nothing(
    tmp_path: Path, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    _interrupt(monkeypatch, 0, model, tmp_path / "out" / "e.parquet", "--images", f"folder:{images}")
    assert not any((tmp_path / "out").iterdir())


def test_second_process_is_refused(
    tmp_path: Path, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, more = tmp_path / "e.parquet", ("--images", f"folder:{images}")
    _interrupt(monkeypatch, 1, model, to, *more)
    _pass(monkeypatch)
    with FileLock(_unfinished(to) / "lock"), pytest.raises(StorageError, match="another process writes"):
        _embed(model, to, *more)
    assert len(_parts(to)) == 1


def test_columns_are_not_taken_from_the_names_of_folders(tmp_path: Path, model: Path, images: Path) -> None:
    (tmp_path / "year=2026").mkdir()
    main(
        [
            *("--model", str(model), "--images", f"folder:{images}"),
            *("--to", str(tmp_path / "year=2026" / "e.parquet")),
        ]
    )
    names = pq.read_schema(tmp_path / "year=2026" / "e.parquet").names
    assert names == ["id", "label", "embedding"]
