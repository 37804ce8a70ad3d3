"""Captions that a model cuts: told where somebody sits, for their number depends on the records."""

from __future__ import annotations

import sys

from sweeps.service.planning.plan import SweepPlan
from trainers.config.training import ClipNetworkConfig
from trainers.data.dataset import captions_of
from trainers.models.clip.published import ClipConfig, find_clip
from trainers.models.clip.tokens import ClipTokenizer


def tell_cut_captions(plan: SweepPlan) -> None:
    """Say on a terminal how many captions are longer than the CLIP model of the first such trial reads.

    Nothing is said where standard error is a file or the log of a job.
    """
    owned = captions_of(plan.data.train)
    networks = (trial.config.network for trial in plan.trials)
    network = next((each for each in networks if isinstance(each, ClipNetworkConfig)), None)
    if owned is None or network is None or not sys.stderr.isatty():
        return
    tokenizer = ClipTokenizer(find_clip(ClipConfig(model=network.name)))
    captions, _ = owned
    if num_cut := tokenizer(captions).num_truncated:
        print(
            f"note (in this terminal alone): {num_cut} of {len(captions)} captions are longer than the "
            f"{tokenizer.context_length} tokens that {network.name} reads, and are cut",
            file=sys.stderr,
        )
