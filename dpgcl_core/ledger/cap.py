"""A data set's cap: its budget, and the privacy filter that is fixed together with it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dpgcl_core.accounting.filters import QuotaFilter, RdpFilter, StepClass
from dpgcl_core.errors import ConfigError, require_whole, unknown_choice
from dpgcl_core.ledger.chain import RECORD
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, check_delta


def line_to_register(
    ledger: str = "LEDGER", dataset_id: str = "NAME", *, unit: str = RECORD, create: bool = False
) -> str:
    """Return the command that registers a data set, with placeholders for ε, δ and N.

    >>> line_to_register("ledger.db", "scans")  # doctest: +ELLIPSIS
    'python -m dpgcl_core.ledger cap --ledger ledger.db --dataset scans --epsilon E ...'
    """
    words = ["python -m dpgcl_core.ledger cap", *(["--create"] if create else [])]
    words += [f"--ledger {shlex.quote(ledger)} --dataset {shlex.quote(dataset_id)}"]
    words += [f"--unit {shlex.quote(unit)}"] * (unit != RECORD)
    return " ".join([*words, "--epsilon E --delta D --num-records-public N"])


@dataclass(frozen=True, kw_only=True)
class Cap:
    """The budget of a data set and the filter that enforces it, both fixed together.

    Attributes:
      epsilon, delta: upper bounds on all charges together.
      order: the RDP filter's order; by default the filter chooses it. Only without quotas.
      quotas: pairs of a step class and its number of steps, for the quota filter; empty for the RDP filter.
      sealed_epsilon, sealed_delta: the part of epsilon and delta set aside for sealed sweeps that are
        charged as (ε, δ), by basic composition; the filter gets the rest.

    Raises:
      ConfigError: a value is out of range, or a class is named twice. (Whether quotas stay within the cap is
        checked at registration and at every admission, because it needs a composition by PLD.)
    """

    epsilon: float
    delta: float
    order: float | None = None
    quotas: tuple[tuple[StepClass, int], ...] = ()
    sealed_epsilon: float = 0.0
    sealed_delta: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            whole, part = getattr(self, name), getattr(self, f"sealed_{name}")
            if not 0 < whole < math.inf:
                raise ConfigError(f"{name} of a cap must be positive and finite; got {whole}")
            if not 0 <= part < whole:
                raise ConfigError(f"sealed_{name} must be in [0, {name} = {whole:g}); got {part}")
        if self.quotas and self.order is not None:
            raise ConfigError("a cap takes an order (RDP filter) or quotas (quota filter), not both")
        if len({step_class for step_class, _ in self.quotas}) < len(self.quotas):
            raise ConfigError("quotas must name each class of steps once; add up the duplicates")
        if not self.quotas:  # store the order now: a later version might choose another
            object.__setattr__(self, "order", self.rdp_filter().order)

    @classmethod
    def for_steps(
        cls,
        epsilon: float,
        delta: float,
        step_classes: Iterable[StepClass],
        *,
        sealed_epsilon: float = 0.0,
        sealed_delta: float = 0.0,
    ) -> Cap:
        """Return the cap of an RDP filter whose order suits the planned classes of steps.

        >>> Cap.for_steps(8.0, 1e-5, [StepClass(0.01, 1.0)]).order
        3.7
        """
        cap = cls(epsilon=epsilon, delta=delta, sealed_epsilon=sealed_epsilon, sealed_delta=sealed_delta)
        best = RdpFilter.for_steps(epsilon - sealed_epsilon, delta - sealed_delta, step_classes)
        return replace(cap, order=best.order)

    def filter(self) -> RdpFilter | QuotaFilter:
        """Return the filter that admits charges."""
        return _quota_filter(self) if self.quotas else self.rdp_filter()

    def rdp_filter(self) -> RdpFilter:
        """Return the RDP filter for the part of the budget that is not set aside for sealed sweeps."""
        return RdpFilter(self.epsilon - self.sealed_epsilon, self.delta - self.sealed_delta, self.order)

    def facts(self) -> dict[str, Any]:
        """Return the cap as values for JSON."""
        values = {name: value for name, value in vars(self).items() if name != "quotas"}
        return values | {"quotas": [[*vars(c).values(), num_steps] for c, num_steps in self.quotas]}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Cap:
        """Return the cap from values of `facts()`."""
        quotas = tuple((StepClass(prob, noise), steps) for prob, noise, steps in facts["quotas"])
        return cls(**{**facts, "quotas": quotas})


@lru_cache(maxsize=32)
def _quota_filter(cap: Cap) -> QuotaFilter:
    """Return the quota filter; it is cached, because it composes all quotas by PLD."""
    return QuotaFilter(cap.epsilon - cap.sealed_epsilon, cap.delta - cap.sealed_delta, dict(cap.quotas))


def check_registration(*, unit: str, neighboring_relation: str, num_records_public: int, cap: Cap) -> None:
    """Raise ConfigError unless a data set's registration is valid."""
    if not unit or not isinstance(unit, str):
        raise ConfigError(f'the unit of privacy needs a name, such as "{RECORD}"; got {unit!r}')
    if neighboring_relation != ADD_OR_REMOVE_ONE:
        raise ConfigError(
            unknown_choice("neighboring_relation", str(neighboring_relation), [ADD_OR_REMOVE_ONE])
        )
    require_whole("num_records_public", num_records_public, least=3)
    check_delta(cap.delta, num_records_public)
    cap.filter()
