"""`python -m dashboards.live`: a page that shows what sweeps do, in a browser on this machine.

python -m dashboards.live --storage ~/dpgcl-results
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path

from dashboards.errors import DashboardError
from dashboards.live.guard import Hosts, is_loopback
from dpgcl_core.addresses import hide_arguments, masked_text
from dpgcl_core.command_line import help_in_columns
from dpgcl_core.errors import DpgclError
from trainers.files.storage import storage_root
from trainers.tracking.server import database_address

PORT = 8421


def live_command(
    storage: Path | None = None,
    tracking_uri: str | None = None,
    ledger: str | None = None,
    host: str = "127.0.0.1",
    port: int = PORT,
) -> None:
    """Show running and finished sweeps in a browser. Nothing is ever written.

    Args:
      storage: folder of the sweeps; default $DPGCL_STORAGE, else the results folder.
      tracking_uri: MLflow server or database; default $MLFLOW_TRACKING_URI, else the storage folder's.
      ledger: budget ledger to show, a path or URL; default $DPGCL_LEDGER.
      host: address to listen at; one that others reach needs a token, which is printed once.
      port: to listen at; 0 for any that is free.
    """
    root = storage_root(storage)
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or database_address(root)
    serve(root, uri, ledger or os.environ.get("DPGCL_LEDGER"), host, port)


def serve(root: Path, tracking_uri: str, ledger: str | None, host: str, port: int) -> None:
    """Serve the page until the process is stopped.

    Raises:
      DashboardError: the address cannot be listened at.
    """
    import uvicorn

    from dashboards.live.server import application
    from dashboards.live.state import Reader

    token = None if is_loopback(host) else secrets.token_urlsafe(32)
    app = application(Reader(root, tracking_uri, ledger), Hosts(host), token)
    config = uvicorn.Config(app, access_log=False, log_config=None, server_header=False, proxy_headers=False)
    with _listening(host, port) as listening:
        print(masked_text(f"storage: {root}, MLflow: {tracking_uri}"), flush=True)
        print(_told(host, listening.getsockname()[1], token), flush=True)
        uvicorn.Server(config).run(sockets=[listening])


def _told(host: str, port: int, token: str | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    if token is None:
        return f"live page: http://{shown}:{port}/ (Ctrl-C ends it)"
    name = socket.gethostname() if host in ("0.0.0.0", "::") else shown
    return (
        f"live page, for whoever has this link, told once: http://{name}:{port}/?token={token}\n"
        "note: HTTP is not encrypted: whoever reads the network reads the page and the token; an SSH tunnel "
        "to a page on 127.0.0.1 is safer"
    )


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except (OSError, OverflowError) as error:
        found.close()
        said = getattr(error, "strerror", None) or str(error)
        raise DashboardError(
            f"the page cannot listen at {host}:{port} ({said}); give another --port"
        ) from error
    return found


def main(arguments: list[str] | None = None) -> int:
    """Serve the page and return the exit code; 2 for bad input."""
    import tyro

    words = sys.argv[1:] if arguments is None else arguments
    try:
        with help_in_columns(words):
            tyro.cli(live_command, prog="python -m dashboards.live", args=words)
    except DpgclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    hide_arguments()
    sys.exit(main())
