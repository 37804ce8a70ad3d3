"""What is as private as the records is shown in a terminal and nowhere else."""

from __future__ import annotations

import contextlib
import os
import pty
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpgcl_core.errors import DataError, exit_on_bad_input
from sweeps.service.options.sweep_options import SweepOptions
from tests.sweeps.support import loaded
from tests.sweeps.test_pairs_data import random_images, write_csv
from trainers.config.tree import replace_options
from trainers.data.faults import RecordsError
from trainers.files.storage import details_kept

each_place = pytest.mark.parametrize("in_a_terminal", [True, False])


def said(act: Callable[[], object], *, in_a_terminal: bool) -> str:
    """What `act` writes to a standard error that is a terminal, or is none."""
    outer, inner = pty.openpty() if in_a_terminal else os.pipe()
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # so ends a terminal whose other end is closed
            while part := os.read(outer, 4096):
                found.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(inner, "w") as stream, contextlib.redirect_stderr(stream):
        act()
    reader.join()
    os.close(outer)
    return b"".join(found).decode()


def meet_corrupt_records() -> None:
    def main() -> int:
        raise RecordsError("2 of 9 rows are corrupt", {"missing image": [3, 7]})

    with pytest.raises(SystemExit):
        exit_on_bad_input(main)


@each_place
def test_positions_of_corrupt_records_are_shown_in_a_terminal_alone(in_a_terminal: bool) -> None:
    text = said(meet_corrupt_records, in_a_terminal=in_a_terminal)
    assert "error: 2 of 9 rows are corrupt" in text
    assert ("missing image: 2, at 0-based positions 3, 7" in text) is in_a_terminal
    assert ("details are shown only in a terminal" in text) is not in_a_terminal


@each_place
def test_number_of_private_rows_left_out_is_told_in_a_terminal_alone(
    in_a_terminal: bool, tmp_path: Path
) -> None:
    own = write_csv(tmp_path, random_images(20), num_corrupt=7)
    options = replace_options(SweepOptions(), dataset=own, no_ledger=True, skip_corrupt=True)
    text = said(lambda: loaded(options), in_a_terminal=in_a_terminal)
    assert ("training data: corrupt rows, skipped (--skip-corrupt): 7" in text) is in_a_terminal
    assert ("7" in text) is in_a_terminal


def write_photos(folder: Path) -> Path:
    """A folder as people have them: colour images, a grey one, an animation, and a file that is none."""
    images = [Image.fromarray(image) for image in random_images(4)]
    (folder / "cats").mkdir(parents=True)
    for number, image in enumerate(images):
        image.save(folder / f"cats/{number}.png")
    images[0].convert("L").save(folder / "cats/grey.png")
    images[0].save(folder / "cats/moving.gif", save_all=True, append_images=images[1:])
    (folder / "cats/notes.txt").write_text("hello")
    return folder


@each_place
def test_what_was_converted_or_left_out_is_counted_in_a_terminal_alone(
    in_a_terminal: bool, tmp_path: Path
) -> None:
    options = replace_options(
        SweepOptions(), dataset=f"folder:{write_photos(tmp_path / 'photos')}", no_ledger=True
    )
    text = said(lambda: loaded(options), in_a_terminal=in_a_terminal)
    told = (
        "skipped, because they are not images (txt): 1",
        "converted to colour like the rest: 1",
        "of which the first frame or page is used: 1",
    )
    assert [each in text for each in told] == [in_a_terminal] * 3


def refused_photos(folder: Path, storage: Path) -> DataError:
    options = replace_options(SweepOptions(), dataset=f"folder:{folder}", no_ledger=True)
    with pytest.raises(DataError) as caught, details_kept(storage):
        loaded(options)
    return caught.value


def write_broken_photos(folder: Path) -> Path:
    write_photos(folder)
    (folder / "cats/broken.jpg").write_bytes(b"no image")
    deep = np.full((8, 8), 40_000, dtype=np.uint16)
    Image.fromarray(deep).save(folder / "cats/deep.png")
    return folder


@each_place
def test_images_that_cannot_be_used_are_named_in_a_terminal_or_a_trusted_file(
    in_a_terminal: bool, tmp_path: Path
) -> None:
    photos, storage = write_broken_photos(tmp_path / "photos"), tmp_path / "storage"

    def main() -> int:
        raise refused_photos(photos, storage)

    def refuse() -> None:
        with pytest.raises(SystemExit):
            exit_on_bad_input(main)

    text = said(refuse, in_a_terminal=in_a_terminal)
    names = [f"unreadable: 1, {photos}/cats/broken.jpg", f"not 8-bit: 1, {photos}/cats/deep.png"]
    assert "save them with 8-bit channels" in text
    assert [name in text for name in names] == [in_a_terminal] * 2
    files = list(storage.rglob("*.txt"))
    assert len(files) == (not in_a_terminal)
    for file in files:
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert all(name in file.read_text() for name in names)
        assert f"details are in {file}" in text


def test_details_that_cannot_be_kept_leave_the_refusal_as_it_is(tmp_path: Path) -> None:
    photos = write_broken_photos(tmp_path / "photos")
    (tmp_path / "file").touch()
    assert refused_photos(photos, tmp_path / "file").details_file is None
