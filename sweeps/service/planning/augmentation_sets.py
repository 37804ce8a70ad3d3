"""Combinations of augmentations, as the option values of a training that switch them on and off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dpgcl_core.errors import ConfigError, unknown_choice
from trainers.config.networks import TextViewConfig, ViewConfig
from trainers.views.caption_views import TEXT_AUGMENTATIONS

NONE = "none"

# Strengths for augmentations that the setting has off: the paper's crop, and SimCLR's colours and blur (Chen
# et al. 2020, at half strength; appendix A).
_ON: dict[str, dict[str, float]] = {
    "crop": {"min_crop_area": 0.8, "max_crop_area": 0.8},
    "jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "blur": {"blur_prob": 0.5},
}
_OFF: dict[str, dict[str, float]] = {
    "crop": {"min_crop_area": 1.0, "max_crop_area": 1.0, "flip_prob": 0.0},
    "jitter": {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0},
    "blur": {"blur_prob": 0.0},
}
IMAGE_AUGMENTATIONS = tuple(_ON)


def combinations(
    views: ViewConfig, text_views: TextViewConfig, images: Sequence[str], texts: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """Return the option changes for every combination of image and text augmentations, by its name.

    Args:
      views, text_views: the sweep's own views; an augmentation that is on there keeps its strength.
      images: names of image augmentations, several joined by +, or "none".
      texts: names of text augmentations in the same form; None if there are no captions.

    Raises:
      ConfigError: a name is unknown, or occurs twice in a combination.

    >>> sets = combinations(ViewConfig(), TextViewConfig(), ["none", "crop+blur"], ["word_swap"])
    >>> list(sets), sets["none, word_swap"]["max_crop_area"], sets["crop+blur, word_swap"]["blur_prob"]
    (['none, word_swap', 'crop+blur, word_swap'], 1.0, 0.5)
    """
    changes = {}
    of_texts = [None] if texts is None else [_parts("text", each, TEXT_AUGMENTATIONS) for each in texts]
    for image in (_parts("image", each, IMAGE_AUGMENTATIONS) for each in images):
        for text in of_texts:
            combination = [image] if text is None else [image, text]
            name = ", ".join("+".join(parts) or NONE for parts in combination)
            changes[name] = _of_images(views, image) | ({} if text is None else _of_texts(text_views, text))
    return changes


def _parts(kind: str, combination: str, augmentations: Collection[str]) -> list[str]:
    """Return the augmentations in a combination's name, in the order of `augmentations`."""
    parts = [] if combination == NONE else combination.split("+")
    for part in parts:
        if part not in augmentations:
            raise ConfigError(unknown_choice(f"{kind} augmentation", part, [*augmentations, NONE]))
    if len(set(parts)) != len(parts):
        raise ConfigError(f"a combination must name each augmentation once; got {combination!r}")
    return [name for name in augmentations if name in parts]


def _of_images(views: ViewConfig, augmentations: Sequence[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, off in _OFF.items():
        strengths = {option: getattr(views, option) for option in off}
        if name not in augmentations:
            changes |= off
        elif all(strengths[option] == off[option] for option in _ON[name]):
            changes |= _ON[name]
    return changes


def _of_texts(text_views: TextViewConfig, augmentations: Sequence[str]) -> dict[str, Any]:
    return {
        f"{name}_prob": (getattr(text_views, f"{name}_prob") or default) if name in augmentations else 0.0
        for name, default in TEXT_AUGMENTATIONS.items()
    }
