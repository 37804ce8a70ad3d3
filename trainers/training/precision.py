"""Mixed precision by fixed rules: a low-precision encoder, everything that protects a record in float32.

Autocast covers the encoder's forward pass alone (`trainers.models.precision`); embeddings leave it in
float32, so similarities, loss, norms, clip factors and sums are float32. There is no loss scaler that
follows the gradients: one record would move the scale of the next step, and with it every record.

float16 gradients underflow below 6e-8, so with float16 the gradient is multiplied by a **public
constant** where it enters the encoder's backward pass, and the clipped sum is divided by it. Proof that
this is still the clipped sum: let s be the scale, g a group's gradient and g' = s·g what arrives. The
group is clipped to s·C, so it contributes Clip_{sC}(g')/s, a vector of norm at most C **whatever** g'
is, rounded, overflown and masked or not. And with s a power of two, multiplication by s and division by
it are exact in float32, so it equals Clip_C(g'/s) bit for bit as long as nothing over- or underflows.
Automatic clipping's γ is scaled with C: sC/(‖g'‖ + sγ)·g'/s = C/(‖g‖ + γ)·g.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from dpgcl_core.clipping.types import GroupInputs, GroupReport, Objective
from dpgcl_core.mechanism.method import GradientRule, GroupRule
from dpgcl_core.noise.sources import Draws
from trainers.models.networks import AnyEncoder


def add_clipped_sum(
    rule: GradientRule,
    total: Tensor,
    encoder: AnyEncoder,
    objective: Objective,
    inputs: GroupInputs,
    scale: float,
    draws: Draws | None,
    complete: Tensor | None = None,
) -> GroupReport:
    """`rule.add_clipped_sum` for objectives whose gradient arrives times `scale` (see the module)."""
    if scale == 1:
        return rule.add_clipped_sum(total, encoder, objective, inputs, draws, complete)
    assert isinstance(rule, GroupRule)  # `TrainingConfig` refuses the others
    scaled = dataclasses.replace(rule, clipper=rule.clipper.scaled(scale))
    total.mul_(scale)  # exact in float64, and captured passes add to this very memory
    report = scaled.add_clipped_sum(total, encoder, objective, inputs, draws, complete)
    total.div_(scale)
    return dataclasses.replace(report, norms=report.norms / scale)
