"""Small networks with every layer kind the clipping engine knows, and some that it does not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpgcl_core.losses.info_nce import two_view_group_loss


class TinyEncoder(nn.Module):
    """Images `[n, 3, 8, 8]` → unit embeddings `[n, 4]`, through all layer kinds with a layer rule."""

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
    """Uses one linear layer twice, and uses no parameter directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 192)
        self.head = nn.Linear(192, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(images.flatten(1)))
        return nn.functional.normalize(self.head(torch.tanh(self.layer(hidden))), dim=-1)


class DirectUse(nn.Module):
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


class ImageTransformer(nn.Module):
    """A small vision transformer: direct uses of class token, positions and projection, fused attention."""

    def __init__(self, *, batch_first: bool = True, need_weights: bool = False) -> None:
        super().__init__()
        self.batch_first, self.need_weights = batch_first, need_weights
        self.patches = nn.Conv2d(3, 8, 4, 4, bias=False)
        self.token = nn.Parameter(0.3 * torch.randn(8))
        self.positions = nn.Parameter(0.3 * torch.randn(5, 8))
        self.before = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        nn.init.normal_(self.attention.in_proj_bias)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.projection = nn.Parameter(0.3 * torch.randn(8, 4))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.view(1, 1, -1).expand(len(x), -1, -1)
        x = torch.cat([token.to(x.dtype), x], dim=1) + self.positions.to(x.dtype)
        y = self.before(x)
        y = y if self.batch_first else y.transpose(0, 1)
        y = self.attention(y, y, y, need_weights=self.need_weights)[0]
        x = x + (y if self.batch_first else y.transpose(0, 1))
        x = x + self.down(torch.tanh(self.up(x)))
        return nn.functional.normalize(x[:, 0] @ self.projection, dim=-1)


class CrossAttention(nn.Module):
    """Queries of one learned table attend to an image's patches, with masks and separate widths."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.queries = nn.Parameter(0.3 * torch.randn(2, 8))
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        padding = torch.zeros(len(x), 4, dtype=torch.bool)
        padding[:, 3] = True
        queries = self.queries.unsqueeze(0).expand(len(x), -1, -1)
        y, _ = self.attention(queries, x, x, key_padding_mask=padding, attn_mask=torch.zeros(2, 4))
        return nn.functional.normalize(self.head(y.flatten(1) * self.scale.exp()), dim=-1)


class Convolutions(nn.Module):
    """Every kind of padding, stride, dilation and number of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, (3, 2), padding="same", padding_mode="zeros"),
            nn.Tanh(),
            nn.Conv2d(6, 6, 3, padding=(2, 1), padding_mode="reflect", groups=6),
            nn.Tanh(),
            nn.Conv2d(6, 4, (2, 3), stride=(2, 1), dilation=(1, 2), padding="valid", groups=2, bias=False),
            nn.Tanh(),
            nn.Conv2d(4, 4, 1),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 4),
        )

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.layers(images), dim=-1)


class TextEncoder(nn.Module):
    """Tokens `[n, length]` → unit embeddings, with the table used twice where `tied`."""

    def __init__(self, *, tied: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=padding_idx)
        self.positions = nn.Parameter(0.3 * torch.randn(7, 6))
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.positions[: tokens.shape[1]]
        x = torch.tanh(self.mix(x).mean(1))
        return nn.functional.normalize(self.out(x), dim=-1)


class TwoTowers(nn.Module):
    """Images and texts with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = ImageTransformer(), TextEncoder()
        self.text_head = nn.Linear(11, 4)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def group_losses(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        images, tokens = inputs
        first = self.image(images.flatten(0, 2)).unflatten(0, images.shape[:3])[:, :, 0]
        second = self.text_head(self.text(tokens.flatten(0, 2)))
        second = nn.functional.normalize(second, dim=-1).unflatten(0, tokens.shape[:3])[:, :, 0]
        logits = torch.einsum("gid,gjd->gij", first, second) * self.logit_scale.exp()
        positives = torch.diagonal(logits, dim1=1, dim2=2)
        return (torch.logsumexp(logits, 2) + torch.logsumexp(logits, 1) - 2 * positives).sum(1)


def built(kind: type[nn.Module]) -> nn.Module:
    """The same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def random_views(groups: int, seed: int = 0) -> Tensor:
    """Views of groups of two records, `[groups, 2, 3, 3, 8, 8]`."""
    return torch.randn(groups, 2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
