"""Classifiers: an encoder of images with a linear layer on its features; the layer or both are trained.

If only the head trains, this is the linear probe of De et al. (2022), trained by private steps: few weights,
and so little noise, on fixed features. If all layers train, it is full fine-tuning. The parts of an encoder
that its features do not use (projection head, decoder, text tower) are kept as they are and never train:
their gradient would be zero, but their noise would not.

Features of networks are nearly collinear, and a linear layer learns slowly on such features. Without noise,
100 steps on the features of an auto-encoder gave 32 % on Fashion-MNIST, and 75 % on whitened features. So a
fixed linear map lies between encoder and head, which whitens the encoder's initial features of *procedural*
images. No record affects the map, and it never trains. So it costs no ε, and a record's gradient is a
function of that record and the iterate.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from trainers.config.networks import HEAD
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.models.encoder import Encoder
from trainers.models.transformer import ImageShape, PatchEncoder

RIDGE = 0.01
"""Added to the variances of standardised features: no direction is stretched more than tenfold."""


ImageEncoder: TypeAlias = Encoder | ImageTextEncoder | PatchEncoder
"""A network whose features of images a classifier reads."""


class Classifier(nn.Module):
    """A linear layer on the whitened features of an encoder.

    Args:
      encoder: the encoder; if all layers train, the weights that its features use are trainable.
      image_shape: (channels, height, width) of the images.
      num_classes: K.
      trained_layers: one of `trainers.config.networks.TRAINED_LAYERS`.

    Attributes:
      feature_dim: width of the features, which k-NN and probes read.
      image_shape, num_classes: the arguments of these names.
    """

    def __init__(
        self, encoder: ImageEncoder, image_shape: ImageShape, *, num_classes: int, trained_layers: str
    ) -> None:
        super().__init__()
        self.image_shape, self.num_classes = image_shape, num_classes
        self.encoder = encoder
        self.feature_dim = encoder.feature_dim
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

    def features(self, images: Tensor) -> Tensor:
        """Return features `[n, feature_dim]` of normalised images `[n, C, H, W]`."""
        return self.encoder.features(images)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[n, num_classes]` of normalised images `[n, C, H, W]`."""
        return self.logits_of(self.features(images))

    def logits_of(self, features: Tensor) -> Tensor:
        """Return logits `[n, num_classes]` of features `[n, feature_dim]`."""
        logits: Tensor = self.classify(self.whiten(features))
        return logits

    @torch.no_grad()
    def whiten_by(self, images: Tensor, batch_size: int = 64) -> None:
        """Set the fixed map before the head so that it whitens the features of these images.

        With D the features' deviations, none below a hundredth of the largest, and R their correlations, the
        map is L⁻¹ D⁻¹ (x − mean), for L Lᵀ = R + 0.01·I.

        Args:
          images: public, normalised images `[n, C, H, W]`, with n at least 2.
          batch_size: number of images per pass.
        """
        features = torch.cat([self.features(part) for part in images.split(batch_size)]).double()
        mean, deviation = features.mean(0), features.std(0)
        # A floor, because a feature may vary more over records than over these images.
        deviation = deviation.clamp_min(RIDGE * float(deviation.max()) or 1.0)
        standard = (features - mean) / deviation
        correlations = standard.T @ standard / (len(standard) - 1)
        factor = torch.linalg.cholesky(correlations + RIDGE * torch.eye(len(correlations)))
        matrix = torch.linalg.solve_triangular(factor, torch.diag(1 / deviation), upper=False)
        self.whiten.weight.copy_(matrix)
        self.whiten.bias.copy_(-matrix @ mean)


def freeze_unread(encoder: ImageEncoder, image_shape: ImageShape) -> None:
    """Freeze, in place, the parameters of an encoder that its features do not use.

    >>> from trainers.config.networks import NetworkConfig
    >>> from trainers.models.encoder import build_encoder
    >>> encoder = build_encoder(NetworkConfig(name="tiny_cnn"), (1, 28, 28), seed=0)
    >>> freeze_unread(encoder, (1, 28, 28))
    >>> [all(p.requires_grad for p in part.parameters()) for part in (encoder.backbone, encoder.head)]
    [True, False]
    """
    parameters = [each for each in encoder.parameters() if each.requires_grad]
    with torch.enable_grad():
        features = encoder.features(torch.zeros(2, *image_shape))
        gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)
