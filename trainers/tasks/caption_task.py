"""Caption task: a network predicts an image's caption token by token (DP-Cap, Sander et al. 2024).

The loss of a record is the cross-entropy of the next token, averaged over the tokens of its own caption and
its end token (equation 3):

    L(image, z_1 … z_T) = 1/T · Σ_{t=0}^{T−1} CE(z_{t+1}, φ(ψ(image), z_1 … z_t))

ψ is the encoder, φ the decoder and z_T the end token. T belongs to the record: nothing is divided by the
number of tokens in a batch, which another record's caption would change. Padding does not count as a token
(`trainers.models.captioner`), and every caption is padded to one public length, not to the longest drawn
caption. The choice among a record's captions, the augmentation of its words and the augmentation of its image
are keyed hashes of (record, public seed, step, view). So the clipped gradient is a function of one record,
and one more record moves the clipped sum by at most C (`dpgcl_core.methods.record_methods`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dpgcl_core.clipping.types import GroupInputs, Objective
from dpgcl_core.errors import ConfigError
from trainers.config.networks import AnyNetworkConfig, CaptionerConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.data.pairs import ImageTextRecords
from trainers.data.shapes import make_shape_pairs
from trainers.evaluation import caption_scores
from trainers.evaluation.scorer import Scoring
from trainers.models.captioner import Captioner, build_captioner
from trainers.models.encoder import ImageShape
from trainers.models.precision import pass_in, scale_gradient
from trainers.tasks.pair_task import pair_views
from trainers.tasks.record_task import NUM_PROBES, PerRecordTask, Rows


class Captions(PerRecordTask[Captioner]):
    """A captioner learns from pairs of an image and a text, from each pair separately."""

    name: ClassVar[str] = CaptionerConfig.task

    def check_records(self, config: TrainingConfig, records: AnyRecords) -> None:
        if not isinstance(records, ImageTextRecords):
            raise ConfigError(
                f"{config.mechanism.method} learns from captions; got images without captions. Use pairs "
                "of images and texts."
            )

    def fresh(self, config: TrainingConfig, image_shape: ImageShape) -> Captioner:
        assert isinstance(config.encoder, CaptionerConfig)
        return build_captioner(config.encoder, image_shape, config.public_seed)

    def make_inputs(
        self, config: TrainingConfig, network: Captioner, records: ImageTextRecords, rows: Rows, step: int
    ) -> tuple[Tensor, Tensor]:
        images, tokens = pair_views(config, network, records, rows, step=step, num_views=1)
        return images, tokens

    def synthetic_records(self, count: int, image_shape: tuple[int, ...]) -> ImageTextRecords:
        return make_shape_pairs(count, seed=0, image_size=image_shape[1])

    def losses(self, network: Captioner, precision: AnyNetworkConfig | None = None) -> Objective:
        config = precision or CaptionerConfig()

        def losses(inputs: GroupInputs) -> Tensor:
            images, tokens = (part.flatten(0, 2) for part in inputs)
            logits = scale_gradient(config, pass_in(config, lambda part: network(part, tokens), images))
            return -network.next_tokens(logits, tokens).per_token().reshape(len(inputs[0]), -1).mean(1)

        return losses

    def evaluate(self, network: Captioner, scoring: Scoring) -> dict[str, float]:
        if scoring.index is None and not isinstance(scoring.queries, ImageTextRecords):
            return {}
        return caption_scores.evaluate(network, scoring)

    def draw_conditions(self, network: Captioner, generator: torch.Generator) -> Tensor:
        """Return the tokens of random captions of several lengths, `[NUM_PROBES, 1, 1, max_tokens]`."""
        words = torch.randint(network.start_token, (NUM_PROBES, network.max_tokens), generator=generator)
        lengths = torch.randint(1, network.max_tokens, (NUM_PROBES, 1), generator=generator)
        places = torch.arange(network.max_tokens)
        tokens = torch.where(places < lengths, words, 0).masked_fill(places == lengths, network.end_token)
        tokens[:, 0] = network.start_token
        return tokens[:, None, None]


CAPTIONS = Captions()
