"""The error of everything that cannot be shown."""

from __future__ import annotations

from dpgcl_core.errors import DpgclError


class DashboardError(DpgclError):
    """Nothing to show, or trials that do not make one figure."""
