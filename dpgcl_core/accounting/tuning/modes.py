"""The release modes of a sweep, and the bounds on ε in each; `tuning.cost` states what each releases."""

from __future__ import annotations

from typing import Final, Literal

OPEN: Final = "open"
SEALED: Final = "sealed"
SEALED_THRESHOLD: Final = "sealed-threshold"
Mode = Literal["open", "sealed", "sealed-threshold"]
THEOREMS = {
    "profile": "profile bound c* (proof in dpgcl_core/accounting/tuning/bounds.py)",
    "pointwise": "pointwise supremum over the privacy loss distribution "
    "(dpgcl_core/accounting/tuning/bounds.py)",
    "ps22": "Papernot and Steinke (2022), Theorem 2 (truncated negative binomial) or 6 (Poisson)",
}
