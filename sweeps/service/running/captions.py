"""Captions that a model cuts: told where somebody sits, for their number depends on the records."""

from __future__ import annotations

import sys

from sweeps.service.planning.plan import SweepPlan
from trainers.data.dataset import captions_of
from trainers.models.clip.published import ClipConfig, find_clip
from trainers.models.clip.tokens import ClipTokenizer


def tell_cut_captions(plan: SweepPlan) -> None:
    """Say on a terminal how many captions are longer than the first trial's model reads.

    Nothing is said where standard error is a file or the log of a job.
    """
    owned = captions_of(plan.data.train)
    if owned is None or not sys.stderr.isatty():
        return
    network = plan.trials[0].config.network
    tokenizer = ClipTokenizer(find_clip(ClipConfig(model=network.name)))
    captions, _ = owned
    if num_cut := tokenizer(captions).num_truncated:
        print(
            f"note (in this terminal alone): {num_cut} of {len(captions)} captions are longer than the "
            f"{tokenizer.context_length} tokens that {network.name} reads, and are cut",
            file=sys.stderr,
        )
