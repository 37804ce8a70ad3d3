"""The error for data that cannot be shown."""

from __future__ import annotations

from dpgcl_core.errors import DpgclError


class DashboardError(DpgclError):
    """There is nothing to show, or the trials do not form one figure."""
