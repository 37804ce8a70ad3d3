"""Captioners (DP-Cap, Sander et al. 2024): one transformer of an image, and another of its caption.

The encoder is a transformer of the image's patches. The decoder attends to the caption's earlier tokens, by
causal self-attention, and to all of the encoder's tokens, by cross-attention. The sizes are from the
paper's table 6. The features that are scored and exported are the mean of the encoder's tokens; the decoder
serves the loss, likelihoods and generated captions.

Tokens come from open_clip's tokeniser, cut at `max_tokens`: a start token, the caption's tokens, an end token
and padding up to that length. Padding has no effect. It comes after every real token, where causal attention
does not look, and the loss omits it. The length is public and the same for every record, so no record's
arithmetic depends on the length of another record's caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainers.config.networks import CaptionerConfig
from trainers.models.clip.published_models import ClipSpec
from trainers.models.clip.tokens import ClipTokenizer
from trainers.models.transformer import (
    Blocks,
    EncoderSize,
    ImageShape,
    PatchEncoder,
    initialise_,
    sequence_positions,
    size_named,
)

_HALF = (0.5, 0.5, 0.5)
_TOKEN_STD = 0.5
"""Deviation of the embeddings' first values, about as large as the fixed positions added to them. At the
usual 0.02 a layer norm of the sum shows only positions: after 80 steps the loss of `cap-toy` was 2.6,
not 0.8."""


@dataclass(frozen=True, kw_only=True)
class Size(EncoderSize):
    """The size of both transformers, and of their tokens.

    Attributes:
      decoder_depth: number of the decoder's blocks.
      decoder_width: width of the decoder.
      vocabulary: number of known tokens, the first of open_clip's.
      max_tokens: maximum number of tokens of a caption, with its start and end.
    """

    decoder_depth: int = 6
    decoder_width: int
    vocabulary: int = 32_000
    max_tokens: int = 40


SIZES = {
    "cap-toy": Size(
        depth=2,
        width=64,
        decoder_depth=2,
        decoder_width=64,
        patch_size=8,
        vocabulary=1024,
        max_tokens=64,
    ),
    "cap-tiny": Size(depth=12, width=384, decoder_width=384),
    "cap-small": Size(depth=12, width=576, decoder_width=576),
    "cap-base": Size(depth=12, width=768, decoder_width=768),
    "cap-large": Size(depth=24, width=1024, decoder_width=768),
}
"""Sizes by name; the toy is for a CPU and generated pairs, the others are from DP-Cap. With 32,000 tokens
they have 0.8 to 2.3 % more weights than in its table 6. A small vocabulary can write every caption, in more
tokens: the toy knows 1,024 tokens, and its 64 places hold every caption of `shapes`."""


class NextTokens(NamedTuple):
    """A captioner's likelihoods of the next tokens.

    Attributes:
      log_likelihoods: float32 `[n, length − 1]`, the log-likelihood of each next token; 0 if the token does
        not count.
      counts: bool `[n, length − 1]`, whether the token counts: it is a caption token or the end token.
    """

    log_likelihoods: Tensor
    counts: Tensor

    def per_token(self) -> Tensor:
        """Return the mean over each caption's own real tokens, `[n]`."""
        return self.log_likelihoods.sum(1) / self.counts.sum(1).clamp_min(1)


class Captioner(PatchEncoder):
    """An encoder of images and a decoder of captions.

    Args:
      config: the configuration, as for `PatchEncoder`. It also decides whether one table serves both the
        tokens that are read and the tokens that are predicted; both uses are layers, whose gradients are
        added up before they are clipped.
      size: the size of encoder and decoder.
      image_shape: (channels, height, width) of the images.

    Attributes:
      max_tokens: maximum number of tokens of a caption, with its start and end.
      vocabulary: number of known tokens.

    Raises:
      ConfigError: the patch size does not divide the image.
    """

    token_positions: Tensor

    def __init__(self, config: CaptionerConfig, size: Size, image_shape: ImageShape) -> None:
        super().__init__(config, size, image_shape)
        self.max_tokens, self.vocabulary = size.max_tokens, size.vocabulary
        width = size.decoder_width
        self.embed_tokens = nn.Embedding(size.vocabulary, width)
        self.decoder = Blocks(
            size.decoder_depth, width, context_width=size.width, recomputes=config.gradient_checkpointing
        )
        self.decoder_norm = nn.LayerNorm(width)
        self.predict = nn.Linear(width, size.vocabulary, bias=False)
        self.register_buffer(
            "token_positions", sequence_positions(width, size.max_tokens - 1), persistent=False
        )
        initialise_(self)
        # A table that also predicts holds smaller numbers, scaled up as inputs (Vaswani et al. 2017).
        self._scale = width**0.5 if config.tie_embeddings else 1.0
        nn.init.normal_(self.embed_tokens.weight, std=_TOKEN_STD / self._scale)
        if config.tie_embeddings:
            self.predict.weight = self.embed_tokens.weight

    @property
    def start_token(self) -> int:
        """The token before every caption."""
        return self.vocabulary - 2

    @property
    def end_token(self) -> int:
        """The token after every caption, before its padding."""
        return self.vocabulary - 1

    @cached_property
    def tokenizer(self) -> ClipTokenizer:
        """The tokeniser of the vocabulary, which returns `max_tokens` tokens for each caption."""
        text = {"context_length": self.max_tokens, "vocab_size": self.vocabulary}
        return ClipTokenizer(
            ClipSpec(name="captioner", architecture={"text_cfg": text}, mean=_HALF, std=_HALF)
        )

    def decode(self, encoded: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits of every next token, `[n, length, vocabulary]`.

        Args:
          encoded: `[n, patches, feature_dim]`, the result of `encode`.
          tokens: int64 `[n, length]`, the first tokens of a caption, at most `max_tokens − 1`.
        """
        length = tokens.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        embedded = self._scale * self.embed_tokens(tokens) + self.token_positions[:length]
        logits: Tensor = self.predict(self.decoder_norm(self.decoder(embedded, encoded, hidden)))
        return logits

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits of all tokens after the first, `[n, length − 1, vocabulary]`.

        Args:
          images: normalised `[n, C, H, W]`.
          tokens: int64 `[n, length]`, whole captions as the tokeniser returns them.
        """
        return self.decode(self.encode(images), tokens[:, :-1])

    def next_tokens(self, logits: Tensor, tokens: Tensor) -> NextTokens:
        """Return the likelihoods of all tokens after the first, and which of them count.

        Args:
          logits: `[n, length − 1, vocabulary]`, the result of `forward`.
          tokens: int64 `[n, length]`, the tokens given to `forward`.
        """
        counts = (tokens[:, :-1] == self.end_token).cumsum(1) == 0
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return NextTokens(torch.where(counts, -losses, 0.0), counts)

    @torch.no_grad()
    def generate(self, images: Tensor) -> list[str]:
        """Return a caption of each image; each token is the likeliest one after the preceding tokens.

        Args:
          images: normalised `[n, C, H, W]`.
        """
        encoded = self.encode(images)
        tokens = torch.full((len(images), 1), self.start_token, device=images.device)
        has_ended = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        while tokens.shape[1] < self.max_tokens and not bool(has_ended.all()):
            logits = self.decode(encoded, tokens)[:, -1]
            logits[:, self.start_token] = -torch.inf
            following = torch.where(has_ended, self.end_token, logits.argmax(1))
            has_ended = has_ended | (following == self.end_token)
            tokens = torch.cat([tokens, following[:, None]], dim=1)
        return [self._text(row) for row in tokens[:, 1:].tolist()]

    def _text(self, tokens: Sequence[int]) -> str:
        end = tokens.index(self.end_token) if self.end_token in tokens else len(tokens)
        return self.tokenizer.text(tokens[:end])


def build_captioner(config: CaptionerConfig, image_shape: ImageShape, seed: int) -> Captioner:
    """Return a freshly initialised captioner on the CPU, a function of its configuration and the seed.

    Args:
      config: the network's configuration.
      image_shape: (channels, height, width).
      seed: public seed.

    Raises:
      ConfigError: the size is unknown, or does not fit the images.

    >>> network = build_captioner(CaptionerConfig(name="cap-toy"), (3, 32, 32), seed=0)
    >>> images, tokens = torch.zeros(2, 3, 32, 32), network.tokenizer(["a red ring", "a cross"]).tokens
    >>> network.features(images).shape, network(images, tokens).shape
    (torch.Size([2, 64]), torch.Size([2, 63, 1024]))
    """
    size = size_named(config.name, SIZES, "dp_cap")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Captioner(config, size, image_shape)
