"""ResNet-18 with GroupNorm (He et al. 2016; Wu and He 2018): the image encoder of the DP-GCL paper.

It has GroupNorm in place of BatchNorm, because statistics across records would break the sensitivity of the
group gradient. Every addition and ReLU is out of place, because per-layer hooks keep these tensors.
"""

from __future__ import annotations

from torch import Tensor, nn

STAGE_CHANNELS = (64, 128, 256, 512)
LARGE_IMAGE_SIDE = 64
"""Images whose smaller side is at least this get the 7×7 stride-2 stem with max-pooling."""


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False
    )
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels), channels)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut, which has a 1×1 convolution if the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, out_channels, 3, stride)
        self.norm1 = _norm(out_channels)
        self.relu1 = nn.ReLU(inplace=False)
        self.conv2 = _conv(out_channels, out_channels, 3, 1)
        self.norm2 = _norm(out_channels)
        self.relu2 = nn.ReLU(inplace=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(_conv(in_channels, out_channels, 1, stride), _norm(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[n, out_channels, H / stride, W / stride]` of `[n, in_channels, H, W]`."""
        residual = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        output: Tensor = self.relu2(residual + self.shortcut(x))
        return output


class ResNet18(nn.Module):
    """ResNet-18 up to the pooled features.

    Args:
      image_shape: (channels, height, width); the stem depends on the smaller side.

    Attributes:
      feature_dim: width of the features, 512.
    """

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        in_channels, height, width = image_shape
        self.feature_dim = STAGE_CHANNELS[-1]
        channels = STAGE_CHANNELS[0]
        stem: list[nn.Module] = [_conv(in_channels, channels, 3, 1), _norm(channels), nn.ReLU(inplace=False)]
        if min(height, width) >= LARGE_IMAGE_SIDE:
            stem[0] = _conv(in_channels, channels, 7, 2)
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*stem)
        blocks: list[nn.Module] = []
        for stage, out_channels in enumerate(STAGE_CHANNELS):
            blocks.append(BasicBlock(channels, out_channels, stride=1 if stage == 0 else 2))
            blocks.append(BasicBlock(out_channels, out_channels, stride=1))
            channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, images: Tensor) -> Tensor:
        """Return features `[n, 512]` of images `[n, channels, H, W]`."""
        features: Tensor = self.pool(self.feature_map(images)).flatten(1)
        return features

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the map before pooling, `[n, 512, h, w]`: 1/8 of the sides, or 1/32 with the large stem."""
        found: Tensor = self.blocks(self.stem(images))
        return found


def resnet18(image_shape: tuple[int, int, int]) -> ResNet18:
    """Return the network for images of shape (channels, height, width).

    >>> sum(p.numel() for p in resnet18((3, 32, 32)).parameters())
    11168832
    """
    return ResNet18(image_shape)
