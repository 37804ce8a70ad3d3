"""`python -m sweeps.doctor`: report problems that keep a sweep from running on a cluster, with their fixes.

python -m sweeps.doctor --dataset npz:/data/scans.npz --storage /shared/results
ray job submit --working-dir . -- python -m sweeps.doctor --json
"""

from __future__ import annotations

import os
from pathlib import Path

from dpgcl_core.command_line import run_command
from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.console.display import show_progress
from sweeps.service.options.data import data_path
from sweeps.service.storage.mlflow_location import tracking_address
from trainers.data.loading import check_dataset_name
from trainers.files.storage import storage_root


def doctor(
    ray_address: str | None = None,
    tracking_uri: str | None = None,
    ledger: str | None = None,
    storage: Path | None = None,
    dataset: str = "digits",
    json: bool = False,
) -> int:
    """Check everything that a sweep needs of a cluster, and print the fixes; exit code 1 if there are any.

    Args:
      ray_address: host:port of the cluster; by default $RAY_ADDRESS or the job's cluster, else a private Ray.
      tracking_uri: MLflow server; by default $MLFLOW_TRACKING_URI or a database under the storage folder.
      ledger: budget ledger, a path or URL; $DPGCL_LEDGER by default.
      storage: folder for results; $DPGCL_STORAGE or ~/dpgcl-results by default.
      dataset: data set that sweeps will train on; only its readability is checked.
      json: print one JSON object.
    """
    from sweeps.doctor.checks import check_ledger, check_machines, check_tracking  # here, with Ray
    from sweeps.doctor.findings import as_json, as_text, is_ready

    check_dataset_name(dataset)
    if ray_address is not None:
        os.environ["RAY_ADDRESS"] = ray_address
    root, path = storage_root(storage), data_path(dataset)
    with show_progress(quiet=json):  # JSON is all that is printed then
        findings = check_machines(str(path) if path else None, root)
    findings.append(check_tracking(tracking_address(tracking_uri, root)))
    findings.append(check_ledger(ledger or os.environ.get("DPGCL_LEDGER")))
    print(as_json(findings) if json else as_text(findings))
    return 0 if is_ready(findings) else 1


def main() -> int:
    """Run the checks, and return the exit code."""
    return int(run_command(doctor, prog="python -m sweeps.doctor"))


if __name__ == "__main__":
    exit_on_bad_input(main)
