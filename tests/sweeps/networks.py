"""Networks of a user's own, for the tests: some may be trained, some must be refused."""

from __future__ import annotations

from torch import Tensor, nn

Shape = tuple[int, int, int]


def _convolution(shape: Shape, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(shape[0], 4, 3, padding=1), *more, nn.AdaptiveAvgPool2d(2), nn.Flatten())


def plain(shape: Shape) -> nn.Module:
    """Mixes no records."""
    return _convolution(shape, nn.ReLU())


def batch_norm(shape: Shape) -> nn.Module:
    """Uses statistics across records."""
    return _convolution(shape, nn.BatchNorm2d(4))


class _Centred(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features - features.mean(0, keepdim=True)


def centred(shape: Shape) -> nn.Module:
    """Mixes records without any layer that is known for it."""
    return _convolution(shape, _Centred())


class _CentredWhenMany(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features - features.mean(0, keepdim=True) if len(features) > 64 else features


def centred_when_many(shape: Shape) -> nn.Module:
    """Mixes the records of large passes alone."""
    return _convolution(shape, _CentredWhenMany())
