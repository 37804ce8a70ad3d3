"""Points along one axis, each private and, where asked for, without privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sweeps.service.options import SweepOptions
from sweeps.service.plan import Point


def along(
    options: SweepOptions, setting: str, values: Sequence[Any], symbol: str, *, non_private: bool = False
) -> list[Point]:
    """Returns one point per distinct value of a setting.

    Args:
      options: the sweep's.
      setting: name of the option that varies.
      values: its values.
      symbol: short name in trial names.
      non_private: also without noise and clipping, where the option has a meaning then.

    >>> [point.label for point in along(SweepOptions(), "temperature", (0.1, 0.5, 0.1), "tau")]
    ['tau0.1-private', 'tau0.5-private']
    """
    found = []
    for value in dict.fromkeys(values):
        label, changes = f"{symbol}{value:g}", {setting: value}
        if options.epsilon != math.inf:
            found.append(Point(label=f"{label}-private", changes=changes))
        if non_private or options.epsilon == math.inf:
            found.append(Point(label=f"{label}-eps-inf", changes=changes | {"epsilon": math.inf}))
    return found
