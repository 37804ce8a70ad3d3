"""Tables and figures of sweeps, from only MLflow's data.

`query` reads MLflow, `compose` selects the content, and `render` draws it. `figures` combines the three.

    from dashboards import draw

    draw("group-size", "sqlite:///results/mlflow.db", None, Path("figures"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpgcl_core.errors import require_extra
from dpgcl_core.lazy_names import lazy_names

require_extra("service", "mlflow", "pandas", needed_by=__name__)

if TYPE_CHECKING:
    from dashboards.compose.answer import Answer as Answer
    from dashboards.compose.answer import answer_of as answer_of
    from dashboards.dashboard_error import DashboardError as DashboardError
    from dashboards.figures import draw as draw
    from dashboards.figures import load_for as load_for
    from dashboards.query.sweeps import list_sweeps as list_sweeps
    from dashboards.query.trial_frames import load_trials as load_trials

__getattr__, __dir__, __all__ = lazy_names(__name__)
