"""Which settings of a training have an effect, given the other settings: a run records only these.

A momentum of Adam or a temperature of a masked auto-encoder is a number that nothing reads. In a table of
runs it would look like a setting, so it is not sent to MLflow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dpgcl_core.mechanism.registry import METHODS
from trainers.config.optimizer_registry import OPTIMIZERS

_CONDITIONS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "temperature": lambda params: _method_takes(params, "takes_temperature"),
    "momentum": lambda params: _has_momentum(params),
    "loss_scale": lambda params: params.get("precision") == "float16",
    **dict.fromkeys(("min_blur_sigma", "max_blur_sigma"), lambda params: bool(params.get("blur_prob"))),
    **dict.fromkeys(("saturation", "hue"), lambda params: _num_channels(params) != 1),
    **dict.fromkeys(
        ("lora_alpha", "lora_targets", "lora_towers", "lora_layers"),
        lambda params: bool(params.get("lora_rank", 1)),
    ),
}
"""The condition under which a setting has an effect; settings that are not listed always have one."""


def settings_with_effect(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `params` that affect the training and are neither None nor empty.

    >>> settings_with_effect({"optimizer_name": "adam", "momentum": 0.9, "lora_targets": ()})
    {'optimizer_name': 'adam'}
    >>> settings_with_effect({"method": "dp_gcl", "temperature": 0.5, "warm_start": None})
    {'method': 'dp_gcl', 'temperature': 0.5}
    >>> settings_with_effect({"method": "dp_mae", "temperature": 0.5})
    {'method': 'dp_mae'}
    """
    return {
        name: value
        for name, value in params.items()
        if value is not None
        and value not in ((), [])
        and (name not in _CONDITIONS or _CONDITIONS[name](params))
    }


def _method_takes(params: Mapping[str, Any], attribute: str) -> bool:
    method = METHODS.get(str(params.get("method")))
    return method is None or bool(getattr(method, attribute))


def _has_momentum(params: Mapping[str, Any]) -> bool:
    optimizer = OPTIMIZERS.get(str(params.get("optimizer_name")))
    return optimizer is None or optimizer.has_momentum


def _num_channels(params: Mapping[str, Any]) -> int | None:
    shape = params.get("image_shape")
    return shape[0] if isinstance(shape, (list, tuple)) else None
