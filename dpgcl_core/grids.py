"""The settings that a plan tries by default; they are apart from `planning`, which loads the accountants."""

from __future__ import annotations

NUM_STEPS = (50, 100, 200, 400, 800, 1600)
GROUP_SIZES = (4, 8, 16, 32)
