"""Every method behind one registry; adding one is one file beside this and one line here."""

from __future__ import annotations

from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.method import GradientRule, LossSettings, Method
from dpgcl_core.methods.baselines.dpcl.methods import (
    DPCL_BARLOW,
    DPCL_BARLOW_RIGOROUS,
    DPCL_SIMCLR,
    DPCL_SIMCLR_RIGOROUS,
)
from dpgcl_core.methods.baselines.whole_batch import DP_SGD, GROUP_CLIP, LOGIT_DP, LOGIT_DP_SPREAD_OUT
from dpgcl_core.methods.in_groups import DP_CLIP, DP_GCL, SIGLIP_GROUPS
from dpgcl_core.methods.non_contrastive import BYOL_GROUPS
from dpgcl_core.methods.without_privacy import BASE, NON_PRIVATE

__all__ = ["METHODS", "GradientRule", "LossSettings", "Method", "method_named"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        DP_GCL,
        DP_CLIP,
        DP_SGD,
        GROUP_CLIP,
        LOGIT_DP,
        LOGIT_DP_SPREAD_OUT,
        DPCL_SIMCLR,
        DPCL_BARLOW,
        DPCL_SIMCLR_RIGOROUS,
        DPCL_BARLOW_RIGOROUS,
        SIGLIP_GROUPS,
        BYOL_GROUPS,
        NON_PRIVATE,
        BASE,
    )
}


def method_named(name: str) -> Method:
    """Returns a method.

    Raises:
      ConfigError: there is none of this name; lists them.

    >>> method_named("dp_gcl").sensitivity_formula
    '2C (C for groups of one)'
    """
    if name not in METHODS:
        raise ConfigError(unknown_choice("method", name, METHODS))
    return METHODS[name]
