"""The scores of one training: before it, during it, noised, and at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trainers.data.dataset import image_shape_of
from trainers.files.checkpoint import holds_noised_scores
from trainers.files.outcome_file import Outcomes
from trainers.models.task_networks import AnyEncoder
from trainers.tasks.task_scores import all_scores, public_outcomes
from trainers.training.release import noised_scores
from trainers.training.step import Training
from trainers.training.warm_start import starting_encoder


@dataclass(kw_only=True, eq=False)
class Scorer:
    """Scores one training's networks, on the first worker.

    Attributes:
      training: the training whose networks are scored.
      at_start: scores of the network before its first step, before the release policy is applied.
      seconds: time spent on scores during the training.
    """

    training: Training
    at_start: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def score_start(self) -> None:
        """Score the network before its first step, and at random weights, if `also_untrained` requests it."""
        training = self.training
        config = training.config
        if not config.evaluation.also_untrained:
            return
        if config.starts_at_random:
            self.at_start = self._compute_scores(prefix="untrained_")
            return
        is_private = config.warm_start is not None and config.warm_start.private is not None
        self.at_start = self._compute_scores(prefix="private_start_" if is_private else "public_start_")
        random = replace(config, warm_start=None)
        if training.is_first_worker and random.starts_at_random:
            shape = image_shape_of(training.data.train)
            network = starting_encoder(random, shape)
            training.task.place(network, next(training.encoder.parameters()).device, shape)
            self.at_start |= self._compute_scores(network, prefix="untrained_")

    def score_on_the_way(self) -> dict[str, float]:
        """Score the current iterate if its step is to be scored; record and return the scores.

        They are functions of released iterates, and may be seen if final scores may.
        """
        training = self.training
        if not training.observer.wants_scores(training.num_steps_done):
            return {}
        started = time.perf_counter()
        scores = training.observer.visible(self._compute_scores(with_probes=False))
        training.observer.note_during(training.num_steps_done, scores)
        self.seconds += time.perf_counter() - started
        return scores

    def draw_noised_scores(self, before_drawing: Callable[[], object] | None) -> bool:
        """Draw the noised scores once, unless the checkpoint has them; return whether they were drawn."""
        training = self.training
        data, final, step = training.data, training.observer.final, training.private_step
        index, records = data.index, data.held_out_records
        if index is None or records is None or holds_noised_scores(final) or not training.is_first_worker:
            return False
        scores = noised_scores(
            training.released_network,
            index,
            records,
            training.config,
            step.randomness.generator(training.num_steps_done, "score noise"),
            next(training.encoder.parameters()).device,
            before_drawing=before_drawing,
        )
        final.update(training.observer.visible(scores))
        return True

    def score_end(self) -> dict[str, float]:
        """Return the scores of the released network, before the release policy is applied."""
        return self._compute_scores()

    def outcomes(self, at_end: dict[str, float]) -> Outcomes | None:
        """Return the outcomes of start and end, record by record, if evaluation records are public."""
        return public_outcomes(self.at_start | at_end, self.training.data, self.training.config)

    def _compute_scores(
        self, network: AnyEncoder | None = None, *, prefix: str = "", with_probes: bool = True
    ) -> dict[str, float]:
        """Return the scores of a network, by default the released network, with their outcomes.

        No scores are computed if none may be seen.
        """
        training = self.training
        if not training.is_first_worker:
            return {}
        return all_scores(
            training.task,
            training.released_network if network is None else network,
            training.data,
            training.config,
            device=next(training.encoder.parameters()).device,
            prefix=prefix,
            with_probes=with_probes,
        )
