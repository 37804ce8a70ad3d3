"""The rows of a comparison that are not private: ordinary training, and no training."""

from __future__ import annotations

from dataclasses import dataclass

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import GuaranteeLabel
from dpgcl_core.mechanism.numbers import RECORDS, PublicNumbers, Sampled
from dpgcl_core.methods.in_groups import InGroups


@dataclass(frozen=True, kw_only=True)
class WithoutPrivacy(InGroups):
    """InfoNCE over the whole batch, without clipping and noise."""

    clip_unit: str = "nothing"
    label: GuaranteeLabel = "none"
    samplings: tuple[Sampled, ...] = (RECORDS,)
    takes_group_size: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity_formula", "none")
        object.__setattr__(self, "proof", "none")

    def check(self, numbers: PublicNumbers) -> None:
        super().check(numbers)
        if numbers.is_private:
            raise ConfigError(
                f"{self.name} adds no noise; got noise_multiplier = {numbers.noise_multiplier:g}. Set "
                "epsilon = inf"
            )


NON_PRIVATE = WithoutPrivacy(
    name="non_private",
    title="Non-private",
    source="InfoNCE",
)
BASE = WithoutPrivacy(
    name="base",
    title="Base, not trained",
    source="",
    trains=False,
)
