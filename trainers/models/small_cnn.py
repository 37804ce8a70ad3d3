"""A small GroupNorm CNN for 8×8 to 64×64 images: the default encoder, trainable on one CPU core.

Under differential privacy the noise grows with the square root of the number of parameters, so here few
parameters matter more than depth.
"""

from __future__ import annotations

from torch import Tensor, nn

POOLED_SIDE = 2


class SmallCnn(nn.Module):
    """Three stride-2 convolutions, each with GroupNorm and ReLU, then average pooling to 2×2.

    Args:
      in_channels: image channels.
      channels: output channels of the convolutions.

    Attributes:
      feature_dim: width of the features: 4 for each channel of the last convolution.
    """

    def __init__(self, in_channels: int, channels: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.feature_dim = channels[-1] * POOLED_SIDE**2
        layers: list[nn.Module] = []
        for out_channels in channels:
            conv = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            # Out of place: per-layer hooks keep these tensors for the clipped gradient.
            layers += [
                conv,
                nn.GroupNorm(out_channels // 4, out_channels),
                nn.ReLU(inplace=False),
            ]
            in_channels = out_channels
        self.layers = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(POOLED_SIDE)

    def forward(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of images `[n, in_channels, H, W]`."""
        features: Tensor = self.pool(self.layers(images)).flatten(1)
        return features

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the map before pooling, `[n, channels, H / 8, W / 8]`, sides rounded up."""
        found: Tensor = self.layers(images)
        return found


def small_cnn(image_shape: tuple[int, int, int]) -> SmallCnn:
    """Return the network for images of shape (channels, height, width).

    >>> sum(p.numel() for p in small_cnn((1, 28, 28)).parameters())
    23408
    """
    return SmallCnn(image_shape[0])


def tiny_cnn(image_shape: tuple[int, int, int]) -> SmallCnn:
    """Return `small_cnn` at half the width, for small data sets and small budgets.

    >>> sum(p.numel() for p in tiny_cnn((1, 28, 28)).parameters())
    5944
    """
    return SmallCnn(image_shape[0], (8, 16, 32))


def wide_cnn(image_shape: tuple[int, int, int]) -> SmallCnn:
    """Return `small_cnn` at twice the width, for trainings that start from public weights.

    With embeddings of 64 dimensions an encoder of grey images has 129,888 weights.

    >>> sum(p.numel() for p in wide_cnn((1, 28, 28)).parameters())
    92896
    """
    return SmallCnn(image_shape[0], (32, 64, 128))
