"""`python -m dashboards`: tables, figures and reports from MLflow alone, and a server that shows them.

python -m dashboards list
python -m dashboards report --sweep NAME --output FOLDER
python -m dashboards figure --question batch-size --sweep NAME --output FOLDER
python -m dashboards compare SWEEP SWEEP
python -m dashboards pareto SWEEP
python -m dashboards burn-down --ledger ledger.db
python -m dashboards serve --storage FOLDER
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tyro.conf import Positional

from dashboards.errors import DashboardError
from dpgcl_core.addresses import hide_arguments
from dpgcl_core.command_line import help_in_columns
from dpgcl_core.errors import DpgclError
from trainers.files.storage import storage_root
from trainers.tracking.server import database_address

PORT = 8421
_LONGEST_NAME = 120


def default_tracking_uri() -> str:
    """Return $MLFLOW_TRACKING_URI, else the database in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or database_address(storage_root(None))


def list_command(tracking_uri: str | None = None) -> None:
    """List the sweeps, newest first; sealed ones last, without start time and number of trials.

    Args:
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
    """
    from dashboards.query.sweeps import list_sweeps  # in the commands, with pandas: help needs none

    sweeps = list_sweeps(tracking_uri or default_tracking_uri())
    print(sweeps.astype(object).where(sweeps.notna(), "sealed").to_string(index=False))


def figure_command(
    question: str,
    tracking_uri: str | None = None,
    sweep: str | None = None,
    output: Path | None = None,
    axis: str | None = None,
) -> None:
    """Draw the figure of a question, and write its tables.

    Writes QUESTION.png, .svg, .pdf, .csv, .md and .tex.

    Args:
      question: group-size, batch-size, num-augmentations, clip-norm, noise-multiplier, privacy-budget,
        temperature, methods, convergence, search, lora-layers, architectures, augmentations, transfer or
        ablation.
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      sweep: name of the sweep; default the one started last.
      output: folder to write; default `figures/SWEEP` in the results folder.
      axis: param to draw against, in place of the question's own.
    """
    from dashboards.compose.questions import find_question
    from dashboards.figures import load_for, write_all
    from dashboards.query.documents import load_answer

    asked = find_question(question)
    asked = asked if axis is None else asked.along(axis)
    uri = tracking_uri or default_tracking_uri()
    trials = load_for(asked, uri, sweep)
    answer = load_answer(uri, trials) if axis is None else None
    folder = output or storage_root(None) / "figures" / folder_name(str(trials["sweep"].iloc[0]))
    _report(lambda: write_all(trials, folder, asked, answer), folder)


def compare_command(
    runs: Positional[tuple[str, ...]],
    /,
    tracking_uri: str | None = None,
    question: str | None = None,
    axis: str | None = None,
    output: Path | None = None,
) -> None:
    """Overlay sweeps of one question that scored the same records, with their paired differences.

    Writes comparison.png, .svg, .pdf, .csv, .md and .tex.

    Args:
      runs: names of sweeps, or ids of their runs; the first is what the others are compared with.
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      question: to draw; default the one that all sweeps recorded.
      axis: param to draw against, in place of the question's own.
      output: folder to write; default `figures/compare_SWEEPS` in the results folder.
    """
    from dashboards.comparisons import draw_comparison

    folder = output or _folder_of("compare", runs)
    uri = tracking_uri or default_tracking_uri()
    _report(lambda: draw_comparison(runs, uri, folder, question=question, axis=axis), folder)


def pareto_command(
    runs: Positional[tuple[str, ...]],
    /,
    tracking_uri: str | None = None,
    score: str | None = None,
    output: Path | None = None,
) -> None:
    """Draw all trials of sweeps by score and ε: of one training, and of the whole sweep with its tuning.

    Writes pareto.png, .svg, .pdf, .csv, .md and .tex.

    Args:
      runs: names of sweeps, or ids of their runs.
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      score: to draw; default the first one that all trials have.
      output: folder to write; default `figures/pareto_SWEEPS` in the results folder.
    """
    from dashboards.comparisons import draw_pareto

    folder = output or _folder_of("pareto", runs)
    _report(lambda: draw_pareto(runs, tracking_uri or default_tracking_uri(), folder, score=score), folder)


def burn_down_command(ledger: str, dataset: str | None = None, output: Path | None = None) -> None:
    """Draw what each data set's budget had left after each row of a ledger, in the ledger's units.

    Writes burn_down_DATASET.png, .svg, .pdf, .csv, .md and .tex.

    Args:
      ledger: file or URL of the ledger.
      dataset: id of one data set; default all of them.
      output: folder to write; default `figures/burn_down` in the results folder.
    """
    from dashboards.ledgers import draw_burn_down

    folder = output or _folder_of("burn_down", [])
    _report(lambda: draw_burn_down(ledger, folder, folder_name, dataset), folder)


def serve_command(
    storage: Path | None = None,
    ledger: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = PORT,
) -> None:
    """Serve a storage folder to a browser: its sweeps, their reports, and what ledgers have left.

    Nothing is ever written.

    Args:
      storage: folder of the sweeps; default $DPGCL_STORAGE, else the results folder.
      ledger: files or URLs of the ledgers to show; default $DPGCL_LEDGER.
      host: address to listen at; one that others reach needs a token, which is printed once.
      port: to listen at; 0 for any that is free.
    """
    from dashboards.serve.index import SweepIndex
    from dashboards.serve.server import serve

    root, own = storage_root(storage), os.environ.get("DPGCL_LEDGER")
    print(f"storage: {root}", flush=True)
    serve(SweepIndex(root), ledger or ((own,) if own else ()), host, port)


def _folder_of(what: str, names: Sequence[str]) -> Path:
    return storage_root(None) / "figures" / folder_name("_".join((what, *names)))[:_LONGEST_NAME]


def _report(draw: Callable[[], Sequence[Path]], folder: Path) -> None:
    """Draw, and print the paths.

    Raises:
      DashboardError: the folder cannot be written.
    """
    try:
        paths = draw()
    except OSError as error:
        raise DashboardError(
            f"{folder} cannot be written ({error.strerror}); give another --output"
        ) from error
    for path in paths:
        print(path)


def group_size_command(
    tracking_uri: str | None = None, sweep: str | None = None, output: Path | None = None
) -> None:
    """Draw accuracy and gradient SNR against group size (the paper's Figure 4).

    The same as `figure --question group-size`.

    Args:
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      sweep: name of the sweep; default the one started last.
      output: folder to write; default `figures/SWEEP` in the results folder.
    """
    figure_command("group-size", tracking_uri, sweep, output)


def report_command(
    tracking_uri: str | None = None, sweep: str | None = None, output: Path | None = None
) -> None:
    """Write the report of a sweep, one HTML file: answer, figure, trials, privacy, how to repeat it.

    Args:
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      sweep: name of the sweep; default the one started last.
      output: folder to write; default `reports/SWEEP` in the results folder.
    """
    from dashboards.report.write import write_report

    uri = tracking_uri or default_tracking_uri()
    folder = output or storage_root(None) / "reports" / (folder_name(sweep) if sweep else "last")
    _report(lambda: [write_report(uri, sweep, folder)], folder)


def folder_name(sweep: str) -> str:
    """Return a sweep's name, fit for a folder.

    >>> folder_name("a b/../c"), folder_name("..")
    ('a_b_.._c', 'sweep')
    """
    return re.sub(r"[^\w.-]+", "_", sweep).strip(".") or "sweep"


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code; 2 for bad input."""
    import tyro

    commands = {
        "figure": figure_command,
        "group-size": group_size_command,
        "list": list_command,
        "report": report_command,
        "compare": compare_command,
        "pareto": pareto_command,
        "burn-down": burn_down_command,
        "serve": serve_command,
    }
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with help_in_columns(words):
            tyro.extras.subcommand_cli_from_dict(commands, prog="python -m dashboards", args=words)
    except DpgclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    hide_arguments()
    sys.exit(main())
