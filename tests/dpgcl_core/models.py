"""Small networks with every layer kind the clipping engine knows, and some that it does not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpgcl_core.losses import two_view_group_loss


class TinyEncoder(nn.Module):
    """Images `[n, 3, 8, 8]` → unit embeddings `[n, 4]`, through all layer kinds with a folding rule."""

    def __init__(self, *, stride: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=stride, padding=1),
            nn.GroupNorm(2, 6),
            nn.Tanh(),
            nn.Conv2d(6, 8, 3, padding=2, dilation=2, groups=2, bias=False),
            nn.GroupNorm(4, 8),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
            nn.LayerNorm(10),
            nn.Tanh(),
            nn.Linear(10, 4, bias=False),
        )

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.layers(images), dim=-1)


class SharedLayer(nn.Module):
    """Uses one linear layer twice, and a bare parameter's worth of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 192)
        self.head = nn.Linear(192, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(images.flatten(1)))
        return nn.functional.normalize(self.head(torch.tanh(self.layer(hidden))), dim=-1)


class BareParameter(nn.Module):
    """Owns a parameter that no layer owns: only the exact loop can handle it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(192))
        self.head = nn.Linear(192, 4)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.head(images.flatten(1) * self.scale), dim=-1)


class AroundForward(nn.Module):
    """Uses a linear layer's weight around its `forward`: hooks alone would miss it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(images.flatten(1)))
        return nn.functional.normalize(nn.functional.linear(hidden, self.head.weight, self.head.bias), dim=-1)


class InPlace(nn.Module):
    """Changes a layer's output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.layers(images), dim=-1)


class SequenceFirst(nn.Module):
    """Passes tokens `[length, n, dim]` through a branch that a zero initialisation silences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, 2)
        self.up = nn.Linear(8, 16)
        self.out = nn.Linear(16, 8)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).permute(2, 0, 1)
        hidden = torch.relu(self.up(tokens)).permute(1, 0, 2)
        tokens = tokens.permute(1, 0, 2) + self.out(hidden)
        return nn.functional.normalize(self.head(torch.tanh(tokens.mean(1))), dim=-1)


class Routed(nn.Module):
    """Sends every record to one of two experts by its own brightness."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(192, 8), nn.Linear(192, 8)])
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        bright = flat.mean(1) > 0
        hidden = flat.new_zeros(len(flat), 8)
        for expert, rows in zip(self.experts, (bright, ~bright), strict=True):
            hidden = hidden.index_put((rows.nonzero()[:, 0],), expert(flat[rows]))
        return nn.functional.normalize(self.head(torch.tanh(hidden)), dim=-1)


def group_losses_of(model: nn.Module, temperature: float = 0.5):  # type: ignore[no-untyped-def]
    """The two-view group loss of `model` on views `[groups, size, views, 3, 8, 8]`."""

    def group_losses(views: Tensor) -> Tensor:
        embeddings = model(views.flatten(0, 2)).unflatten(0, views.shape[:3])
        return two_view_group_loss(embeddings, temperature=temperature)

    return group_losses
