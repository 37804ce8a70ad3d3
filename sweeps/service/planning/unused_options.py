"""Options that the user set but that no training of a sweep reads, such as adapters of a CNN."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainers.config.active_settings import settings_with_effect
from trainers.config.networks import NetworkOptions
from trainers.config.presets import SETTINGS
from trainers.config.tree import leaves, values_of

_ALWAYS_READ = frozenset({"network", "warm_start"})


def unread_options(network: NetworkOptions, params: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the network's options that the user set and that have no effect.

    An option whose value occurs in any named setting counts as not set.

    Args:
      network: the sweep's network options.
      params: every training's params, from `TrainingConfig.as_params`.

    >>> unread_options(NetworkOptions(lora_rank=4), [{"method": "dp_gcl", "embedding_dim": 16}])
    ['lora_rank']
    >>> unread_options(NetworkOptions(lora_rank=4), [{"method": "dp_gcl", "lora_rank": 4}])
    []
    """
    read = _ALWAYS_READ.union(*map(settings_with_effect, params))
    values = values_of(network)
    usual = {name: [values_of(setting.network)[name] for setting in SETTINGS.values()] for name in values}
    return [name for name in leaves(NetworkOptions) if name not in read and values[name] not in usual[name]]


def unread_note(names: Collection[str]) -> list[str]:
    """Return the advice about unread options; empty if there are no such options.

    >>> unread_note(["lora_rank", "lora_targets"])
    ['This sweep ignores --lora-rank and --lora-targets: its networks do not use them.']
    """
    if not names:
        return []
    flags = " and ".join("--" + name.replace("_", "-") for name in names)
    them = "them" if len(names) > 1 else "it"
    return [f"This sweep ignores {flags}: its networks do not use {them}."]
