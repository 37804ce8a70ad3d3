"""Differentially private contrastive learning: losses, groups, clipping, noise, accountants, ledger."""

from __future__ import annotations

from dpgcl_core import methods as methods  # registers the methods of this package
