"""A network of a user's own that tells a secret by the errors it raises, in the text or in the class's name.

With the public seeds below it fails on records that begin with `planted.PIXELS`, so on no probe, or as it is
built. Planning builds it with seed 0, which does nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError, LedgerError, unknown_choice
from tests.sweeps.planted import PIXELS
from trainers.views.image_views import PIXEL_MEAN, PIXEL_STD

SECRET = "OmbreluneQuillfeather"
TEXT, TEXT_OF_THE_LEDGER, OWN_FUNCTION, NAME, AS_IT_IS_BUILT = 1, 2, 3, 4, 5


class OmbreluneQuillfeather(ConfigError):  # noqa: N818 (its name is the secret)
    """No text."""


class _Telling(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self._layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self._seed = torch.initial_seed()
        if self._seed == AS_IT_IS_BUILT:
            raise ConfigError(SECRET)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.detach().flatten(1)[:, : len(PIXELS)] * PIXEL_STD + PIXEL_MEAN
        if (rows[0] * 255).round().to(torch.uint8).numpy().tobytes() == PIXELS and self._seed:
            _raise(self._seed)
        features: Tensor = self._layers(images)
        return features


def _raise(seed: int) -> None:
    if seed == TEXT_OF_THE_LEDGER:
        error = LedgerError(f"the budget ledger grants {SECRET}")
        error.add_note(SECRET)
        raise error from ValueError(SECRET)
    if seed == OWN_FUNCTION:
        raise ConfigError(unknown_choice(SECRET, SECRET, [SECRET]))
    if seed == NAME:
        raise OmbreluneQuillfeather("no text")
    raise ConfigError(SECRET)


def network(shape: tuple[int, int, int]) -> nn.Module:
    """The factory."""
    return _Telling(shape[0])
