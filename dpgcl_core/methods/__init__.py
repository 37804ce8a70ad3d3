"""The methods of this package; importing it registers them (`dpgcl_core.mechanism.registry`)."""

from __future__ import annotations

from dpgcl_core.mechanism.registry import register_installed
from dpgcl_core.methods.baselines.dp_sgd import DP_SGD
from dpgcl_core.methods.baselines.dpcl.dpcl_method import (
    DPCL_BARLOW,
    DPCL_BARLOW_RIGOROUS,
    DPCL_SIMCLR,
    DPCL_SIMCLR_RIGOROUS,
)
from dpgcl_core.methods.baselines.group_clip import GROUP_CLIP
from dpgcl_core.methods.baselines.logit_dp.logit_dp_method import LOGIT_DP, LOGIT_DP_SPREAD_OUT
from dpgcl_core.methods.in_groups import DP_CLIP, DP_GCL, SIGLIP_GROUPS
from dpgcl_core.methods.non_contrastive import BYOL_GROUPS
from dpgcl_core.methods.record_methods import DP_CAP, DP_CLASSIFIER, DP_MAE
from dpgcl_core.methods.without_privacy import BASE, NON_PRIVATE

for _method in (  # in the order of tables and figures
    DP_GCL,
    DP_CLIP,
    DP_SGD,
    GROUP_CLIP,
    LOGIT_DP,
    LOGIT_DP_SPREAD_OUT,
    SIGLIP_GROUPS,
    BYOL_GROUPS,
    DP_MAE,
    DPCL_SIMCLR,
    DPCL_BARLOW,
    DPCL_SIMCLR_RIGOROUS,
    DPCL_BARLOW_RIGOROUS,
    DP_CAP,
    DP_CLASSIFIER,
    NON_PRIVATE,
    BASE,
):
    register_installed(_method)
