"""Classifiers: an encoder of images with a linear layer on its features, of which either part or both train.

With the head alone it is the linear probe of De et al. (2022), trained by private steps: few weights, and so
little noise, on features that nothing moves. With all layers it is full fine-tuning. What of an encoder its
features do not read (projection head, decoder, text tower) is kept as it is and never trains: its gradient
would be zero, and its noise is not.

Features of networks are nearly collinear, and a linear layer learns slowly on such: without noise, 100 steps
on those of an auto-encoder gave 32 % of Fashion-MNIST, and 75 % on whitened ones. So a fixed linear map
stands between, which whitens the encoder's first features of *procedural* images. No record has a part in it,
and it never trains: it costs no ε, and a record's gradient is a function of that record and the iterate.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from trainers.config.networks import HEAD
from trainers.models.transformer import ImageShape

RIDGE = 0.01
"""Added to the variances of standardised features: no direction is stretched more than tenfold."""


class Features(Protocol):
    """What a classifier asks of its encoder."""

    feature_dim: int

    def features(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of normalised images `[n, C, H, W]`."""


class Classifier(nn.Module):
    """A linear layer on the whitened features of an encoder.

    Args:
      encoder: a module with `features`; with all layers trained, its weights that they read are trainable.
      image_shape: (channels, height, width) of the images.
      num_classes: K.
      trained_layers: of `trainers.config.networks.TRAINED_LAYERS`.

    Attributes:
      feature_dim: width of the features, which k-NN and probes read.
      image_shape, num_classes: as given.
    """

    def __init__(
        self, encoder: nn.Module, image_shape: ImageShape, *, num_classes: int, trained_layers: str
    ) -> None:
        super().__init__()
        self.image_shape, self.num_classes = image_shape, num_classes
        self.encoder = encoder
        self.feature_dim = self._readable.feature_dim
        if trained_layers == HEAD:
            encoder.requires_grad_(False)
        else:
            freeze_unread(encoder, image_shape)
        self.whiten = nn.Linear(self.feature_dim, self.feature_dim).requires_grad_(False)
        self.classify = nn.Linear(self.feature_dim, num_classes)
        nn.init.eye_(self.whiten.weight)
        nn.init.zeros_(self.classify.weight)
        for layer in (self.whiten, self.classify):
            nn.init.zeros_(layer.bias)

    @property
    def _readable(self) -> Features:
        return cast(Features, self.encoder)

    def features(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of normalised images `[n, C, H, W]`."""
        return self._readable.features(images)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[n, num_classes]` of normalised images `[n, C, H, W]`."""
        return self.logits_of(self.features(images))

    def logits_of(self, features: Tensor) -> Tensor:
        """Return logits `[n, num_classes]` of features `[n, feature_dim]`."""
        logits: Tensor = self.classify(self.whiten(features))
        return logits

    @torch.no_grad()
    def whiten_by(self, images: Tensor, batch_size: int = 64) -> None:
        """Have the fixed map whiten the features of these images from here on.

        With D the features' deviations, none below a hundredth of the largest, and R their correlations it
        is L⁻¹ D⁻¹ (x − mean), for L Lᵀ = R + 0.01·1.

        Args:
          images: public ones, normalised, `[n, C, H, W]` with n of two at least.
          batch_size: images passed at once.
        """
        found = torch.cat([self.features(part) for part in images.split(batch_size)]).double()
        mean, deviation = found.mean(0), found.std(0)
        deviation = deviation.clamp_min(RIDGE * float(deviation.max()) or 1.0)  # records may vary it more
        standard = (found - mean) / deviation
        correlations = standard.T @ standard / (len(standard) - 1)
        factor = torch.linalg.cholesky(correlations + RIDGE * torch.eye(len(correlations)))
        matrix = torch.linalg.solve_triangular(factor, torch.diag(1 / deviation), upper=False)
        self.whiten.weight.copy_(matrix)
        self.whiten.bias.copy_(-matrix @ mean)


def freeze_unread(encoder: nn.Module, image_shape: ImageShape) -> None:
    """Freeze, in place, what of an encoder its features do not read.

    >>> from trainers.config.networks import NetworkConfig
    >>> from trainers.models.encoder import build_encoder
    >>> encoder = build_encoder(NetworkConfig(name="tiny_cnn"), (1, 28, 28), seed=0)
    >>> freeze_unread(encoder, (1, 28, 28))
    >>> [all(p.requires_grad for p in part.parameters()) for part in (encoder.backbone, encoder.head)]
    [True, False]
    """
    parameters = [each for each in encoder.parameters() if each.requires_grad]
    with torch.enable_grad():
        features = cast(Features, encoder).features(torch.zeros(2, *image_shape))
        found = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.requires_grad_(gradient is not None)
