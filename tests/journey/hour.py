"""From a clean clone to a probe: plan, sweep with ledger, Ctrl-C, resume, answer, export, Python, probe.

Real sweeps of real trainings, in sizes that two cores train in a minute. Commands that the project prints are
pasted as they stand; where a printed one leaves a place free, such as FILE, the reader fills it in.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

from tests.journey.records import NUM_PATIENTS, Files, make_files
from tests.journey.shell import Shell, fill_in, printed_after, quoted
from tests.mutants.running import copy_tree

_SMALL = "--epsilon 4 --expected-batch-size 32 --num-steps 60 --repeats 2"


def prepare(root: Path) -> tuple[Shell, Files]:
    """Return a shell in a copy of the project below a new folder, and data beside it."""
    clone = root / "a clone"
    clone.mkdir(parents=True)
    copy_tree(clone)
    return Shell(clone, root), make_files(root)


def go_with_images(shell: Shell, files: Files) -> None:
    """Scans of patients, scored on public ones."""
    data = (
        f"--dataset {quoted(f'parquet:{files.table}')} --unit-column patient "
        f"--evaluate-on {quoted(f'folder:{files.public_folder}')}"
    )
    plan = shell.type(
        f"python sweeps/plan.py --dataset {quoted(f'parquet:{files.table}')} --unit-column patient "
        f"--num-records-public {NUM_PATIENTS} --epsilon 4 --image-shape 1 16 16 --network tiny_cnn"
    )
    for command in re.findall(r"python sweeps/(?!plan).*", plan):
        shell.type(f"{command} --no-ledger --dry-run")
    folder = _sweep(
        shell, f"python sweeps/group_size.py {data} --network tiny_cnn --group-sizes 2 4 {_SMALL}"
    )
    exported, said = _export(shell, folder)
    free = {"folder:PATH": quoted(f"folder:{files.public_folder}")}
    shell.paste(
        said,
        before="embed images with it: ",
        change=lambda line: f"{fill_in(line, free)} --to {quoted(folder.parent / 'public.npz')}",
    )
    code = f"""
import numpy as np
from trainers import embed_images, load_encoder, read_images
encoder, model = load_encoder({str(exported)!r})
names, images = read_images({f"folder:{files.public_folder}"!r}, model.image_shape)
embeddings = embed_images(encoder, images)
by_command = np.load({str(folder.parent / "public.npz")!r})
assert np.allclose(embeddings, by_command["embeddings"], atol=1e-4)
labels = np.array([1.0 if "square" in name else -1.0 for name in names.tolist()])
features = np.c_[embeddings, np.ones(len(embeddings))]
weights = np.linalg.lstsq(features[::2], labels[::2], rcond=1e-3)[0]
print("probe:", float((np.sign(features[1::2] @ weights) == labels[1::2]).mean()))
"""
    assert float(printed_after(shell.type(f"python -c {quoted(code)}"), "probe: ")) > 0.5


def go_with_captions(shell: Shell, files: Files) -> None:
    """The same scans with captions: a CLIP model, which open_clip reads afterwards."""
    data = (
        f"--dataset {quoted(f'csv:{files.pairs}')} --unit-column patient --image-size 32 "
        f"--evaluate-on {quoted(f'csv:{files.public_pairs}')}"
    )
    folder = _sweep(shell, f"python sweeps/temperature.py {data} --temperatures 0.1 0.5 {_SMALL}")
    _, said = _export(shell, folder)
    texts = folder.parent / "captions.txt"
    texts.write_text("a bright disk\na bright square\n")
    free = {"folder:PATH": quoted(f"folder:{files.public_folder}"), "FILE": quoted(texts)}
    shell.paste(
        said,
        before="embed with it: ",
        change=lambda line: f"{fill_in(line, free)} --to {quoted(folder.parent / 'captions.npz')}",
    )
    loads = printed_after(said, "open_clip reads it: ")
    tokenizes = printed_after(said, "its tokenizer: ")
    code = f"""
{loads}
tokenizer = {tokenizes}
texts = model.encode_text(tokenizer(["a bright disk", "a bright square"]), normalize=True)
import numpy as np
by_command = np.load({str(folder.parent / "captions.npz")!r})
print("probe:", float(abs(texts.detach().numpy() - by_command["text_embeddings"]).max()))
"""
    assert float(printed_after(shell.type(f"python -c {quoted(code)}"), "probe: ")) < 1e-3


JOURNEYS: dict[str, Callable[[Shell, Files], None]] = {"images": go_with_images, "captions": go_with_captions}


def _sweep(shell: Shell, command: str) -> Path:
    """Go from a refusal for want of a ledger to an answer, over a Ctrl-C; return the sweep's folder."""
    refused = shell.type(command, codes=(2,))
    ledger = shell.folder.parent / "the ledger.db"

    free = {"LEDGER": quoted(ledger), "NAME": "scans", "E": "40", "D": "1e-3", "N": str(NUM_PATIENTS)}
    shell.paste(refused, before="To create a ledger, run once: ", change=lambda line: fill_in(line, free))
    charged = f"{command} --ledger {quoted(ledger)} --dataset-id scans"
    shell.type(f"{charged} --dry-run")
    stopped = shell.interrupt(charged, after="[1/4]")
    said = shell.paste(
        stopped,
        before="continue with ",
        change=lambda line: f"{charged} {line}" if line.startswith("--") else line,
    )
    assert re.search(r"^\[4/4\]", said, re.M), said
    folder = Path(printed_after(said, "files: "))
    answer = json.loads((folder / "answer.json").read_text())
    assert f"answer: {answer['lines'][0]}" in said
    assert Path(printed_after(said, "report: ")).is_file()
    _open_runs(shell, printed_after(said, "runs: "))
    assert f"privacy: {json.loads((folder / 'privacy_statement.json').read_text())['headline']}" in said
    assert "All that this sweep releases together is (ε = " in said
    shell.type(
        f"python -m dpgcl_core.ledger verify --ledger {quoted(ledger)} "
        f"--against {quoted(folder / 'privacy_statement.json')}"
    )
    such = "--dataset scans --epsilon 4 --expected-batch-size 32 --num-steps 60"
    left = shell.type(f"python -m dpgcl_core.ledger remaining --ledger {quoted(ledger)} {such}")
    assert printed_after(said, "The ledger allows ").split()[0] in left
    return folder


def _open_runs(shell: Shell, printed: str) -> None:
    """Start what shows the runs, at a port of its own, and read the page that is named."""
    command, address = printed.split("  # then ")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shell.serve(f"{command} --host 127.0.0.1 --port {port}", address.replace(":5000/", f":{port}/"))


def _export(shell: Shell, folder: Path) -> tuple[Path, str]:
    """Export the sweep's model; return its folder and what was printed."""
    said = shell.type(f"python -m trainers.export --sweep {folder.name}")
    return Path(printed_after(said, "written: ")), said
