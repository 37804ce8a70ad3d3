"""`python -m dashboards`: tables and figures from MLflow alone.

python -m dashboards list
python -m dashboards figure --question batch-size --sweep NAME --output FOLDER
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from dashboards.compose.questions import find_question
from dashboards.errors import DashboardError
from dashboards.figures import load_for, write_figure, write_table
from dashboards.query.sweeps import list_sweeps
from dpgcl_core.addresses import hide_arguments
from dpgcl_core.errors import DpgclError
from trainers.files.storage import storage_root


def default_tracking_uri() -> str:
    """Return $MLFLOW_TRACKING_URI, else the database in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{storage_root(None) / 'mlflow.db'}"


def list_command(tracking_uri: str | None = None) -> None:
    """List the sweeps, newest first; sealed ones last, without start time and number of trials.

    Args:
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
    """
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

    Writes QUESTION.png, .svg, .pdf, .html, .csv and .md.

    Args:
      question: group-size, batch-size, num-augmentations, clip-norm, noise-multiplier, privacy-budget,
        temperature, methods, convergence, search, lora-layers, architectures, augmentations, transfer or
        ablation.
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the results folder's.
      sweep: name of the sweep; default the one started last.
      output: folder to write; default `figures/SWEEP` in the results folder.
      axis: param to draw against, in place of the question's own.
    """
    asked = find_question(question)
    asked = asked if axis is None else asked.along(axis)
    trials = load_for(asked, tracking_uri or default_tracking_uri(), sweep)
    name = re.sub(r"[^\w.-]+", "_", str(trials["sweep"].iloc[0])).strip(".") or "sweep"
    folder = output or storage_root(None) / "figures" / name
    try:
        paths = [*write_figure(trials, folder, asked), *write_table(trials, folder, asked)]
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


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code; 2 for bad input."""
    import tyro

    commands = {"figure": figure_command, "group-size": group_size_command, "list": list_command}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="python -m dashboards", args=arguments)
    except DpgclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    hide_arguments()
    sys.exit(main())
