"""`python -m dashboards`: tables, figures and reports from only MLflow's data, and a server that shows them.

python -m dashboards list
python -m dashboards report --sweep NAME --output FOLDER
python -m dashboards figure --question batch-size --sweep NAME --output FOLDER
python -m dashboards compare SWEEP SWEEP
python -m dashboards pareto SWEEP
python -m dashboards serve --storage FOLDER
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from tyro.conf import Positional

from dashboards.dashboard_error import DashboardError
from dpgcl_core.command_line import run_command
from dpgcl_core.errors import exit_on_bad_input
from trainers.files.storage import storage_root
from trainers.tracking.mlflow_server import database_address

_LONGEST_NAME = 120
_REMOVED = {
    "--score": "removed in 0.2.0: use MLflow's scatter plot for other scores than the first",
    "group-size": "removed in 0.2.0: use figure --question group-size",
    "importance": "removed in 0.2.0: use optuna-dashboard with the stored study (docs/sweeps.md)",
    "retrieval": "removed in 0.2.0: use embeddings of trainers.embed_images (docs/models.md)",
}
"""Commands and options of earlier versions, and what to use instead."""


def default_tracking_uri() -> str:
    """Return $MLFLOW_TRACKING_URI, else the database in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or database_address(storage_root(None))


def list_command(tracking_uri: str | None = None) -> None:
    """List the sweeps, newest first; sealed ones last, without start time and number of trials.

    Args:
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
    """
    from dashboards.query.sweeps import list_sweeps  # loads pandas, which --help does not need

    sweeps = list_sweeps(tracking_uri or default_tracking_uri())
    print(sweeps.astype(object).where(sweeps.notna(), "sealed").to_string(index=False))


def figure_command(
    question: str,
    tracking_uri: str | None = None,
    sweep: str | None = None,
    output: Path | None = None,
    axis: str | None = None,
) -> list[Path]:
    """Draw the figure of a question, and write its tables.

    Writes QUESTION.png, .svg, .pdf, .csv, .md and .tex.

    Args:
      question: group-size, batch-size, num-augmentations, clip-norm, noise-multiplier, privacy-budget,
        temperature, methods, convergence, search, lora-layers, architectures, augmentations, transfer or
        ablation.
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      sweep: name of the sweep; default the sweep started last.
      output: folder to write; default `figures/SWEEP` in the results folder.
      axis: param to draw against, instead of the question's own axis.
    """
    from dashboards.compose.questions import find_question
    from dashboards.figures import load_for, write_all
    from dashboards.query.documents import load_answer

    figure_question = find_question(question)
    figure_question = figure_question if axis is None else figure_question.along(axis)
    uri = tracking_uri or default_tracking_uri()
    trials = load_for(figure_question, uri, sweep)
    answer = load_answer(uri, trials) if axis is None else None
    return write_all(trials, output or _folder_of(str(trials["sweep"].iloc[0])), figure_question, answer)


def compare_command(
    runs: Positional[tuple[str, ...]],
    /,
    tracking_uri: str | None = None,
    question: str | None = None,
    axis: str | None = None,
    output: Path | None = None,
) -> list[Path]:
    """Overlay sweeps of one question that scored the same records, with their paired differences.

    Writes comparison.png, .svg, .pdf, .csv, .md and .tex.

    Args:
      runs: names of sweeps, or ids of their runs; the others are compared with the first.
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      question: question to draw; default the question that all sweeps recorded.
      axis: param to draw against, instead of the question's own axis.
      output: folder to write; default `figures/compare_SWEEPS` in the results folder.
    """
    from dashboards.compose.comparison import comparison_of, overlay_sweeps, question_of
    from dashboards.figures import load_for, write_drawing
    from dashboards.query.trial_frames import load_trials

    uri = tracking_uri or default_tracking_uri()
    common_question = question_of([load_trials(uri, run) for run in runs], question)
    common_question = common_question if axis is None else common_question.along(axis)
    trials = overlay_sweeps([load_for(common_question, uri, run) for run in runs])
    content, numbers = comparison_of(trials, common_question)
    return write_drawing(content, numbers, output or _folder_of("compare", *runs), "comparison")


def pareto_command(
    runs: Positional[tuple[str, ...]],
    /,
    tracking_uri: str | None = None,
    output: Path | None = None,
) -> list[Path]:
    """Draw all trials of sweeps by score and ε: ε of one training, and ε of the whole sweep with its tuning.

    Writes pareto.png, .svg, .pdf, .csv, .md and .tex.

    Args:
      runs: names of sweeps, or ids of their runs.
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      output: folder to write; default `figures/pareto_SWEEPS` in the results folder.
    """
    from dashboards.compose.pareto import pareto_of
    from dashboards.figures import write_drawing
    from dashboards.query.trial_frames import load_trials

    uri = tracking_uri or default_tracking_uri()
    content, numbers = pareto_of([load_trials(uri, run) for run in runs])
    return write_drawing(content, numbers, output or _folder_of("pareto", *runs), "pareto")


def serve_command(
    storage: Path | None = None,
    ledger: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 8421,
) -> None:
    """Serve a storage folder to a browser: its sweeps, their reports, and the remaining budgets of ledgers.

    Nothing is ever written.

    Args:
      storage: folder of the sweeps; default $DPGCL_STORAGE, else the results folder.
      ledger: files or URLs of the ledgers to show; default $DPGCL_LEDGER.
      host: address to listen on; if others can reach it, a token is needed, which is printed once.
      port: port to listen on; 0 for any free port.
    """
    from dashboards.serve.dashboard_server import serve
    from dashboards.serve.index import SweepIndex

    root, default_ledger = storage_root(storage), os.environ.get("DPGCL_LEDGER")
    print(f"storage: {root}", flush=True)
    serve(SweepIndex(root), ledger or ((default_ledger,) if default_ledger else ()), host, port)


def _folder_of(*names: str) -> Path:
    return storage_root(None) / "figures" / folder_name("_".join(names))[:_LONGEST_NAME]


def report_command(
    tracking_uri: str | None = None, sweep: str | None = None, output: Path | None = None
) -> list[Path]:
    """Write the report of a sweep, one HTML file: answer, figure, trials, privacy, how to repeat it.

    Args:
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      sweep: name of the sweep; default the sweep started last.
      output: folder to write; default `reports/SWEEP` in the results folder.
    """
    from dashboards.report.write import write_report

    uri = tracking_uri or default_tracking_uri()
    folder = output or storage_root(None) / "reports" / (folder_name(sweep) if sweep else "last")
    return [write_report(uri, sweep, folder)]


def folder_name(sweep: str) -> str:
    """Return a sweep's name in a form that is valid for a folder.

    >>> folder_name("a b/../c"), folder_name("..")
    ('a_b_.._c', 'sweep')
    """
    return re.sub(r"[^\w.-]+", "_", sweep).strip(".") or "sweep"


def main(arguments: list[str] | None = None) -> int:
    """Run one command, print the paths of the files it wrote, and return 0.

    Raises:
      DpgclError: the input is invalid, or a folder cannot be written.
    """
    commands: dict[str, Callable[..., list[Path] | None]] = {
        "figure": figure_command,
        "list": list_command,
        "report": report_command,
        "compare": compare_command,
        "pareto": pareto_command,
        "serve": serve_command,
    }
    try:
        paths = run_command(commands, prog="python -m dashboards", arguments=arguments, removals=_REMOVED.get)
    except OSError as error:
        raise DashboardError(
            f"{error.filename} cannot be written ({error.strerror}); pass another --output"
        ) from error
    for path in paths or ():
        print(path)
    return 0


if __name__ == "__main__":
    exit_on_bad_input(main)
