"""Metrics that a training records about itself, subject to the release policy.

With private training records nothing here is even computed, because these numbers depend on the records
outside the mechanism. With public records, the ablation plots are drawn from them. The only exception is the
noised SNR of the first step, which is a separate mechanism and is charged
(`dpgcl_core.release.noised_counts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgcl_core.clipping.types import GroupReport
from dpgcl_core.noise.randomness import Draws, DrawSource
from dpgcl_core.release import metrics as metric_policy
from dpgcl_core.release.noised_counts import noised_norm
from dpgcl_core.sampling.stage import DrawnGroups
from dpgcl_core.workers import Workers
from trainers.config.training import TrainingConfig

Series = dict[str, list[tuple[int, float]]]


class Observer:
    """Collects the per-step metrics and scores that may leave the training.

    Attributes:
      series: per-step values by declared name, as (step, value).
      final: values that exist only once: scores of the untrained network, SNR of the first step.
    """

    def __init__(self, config: TrainingConfig, *, train_is_public: bool, evaluation_is_public: bool) -> None:
        self.series: Series = {}
        self.final: dict[str, float] = {}
        self._config = config
        self._train_is_public = train_is_public
        self._evaluation_is_public = evaluation_is_public

    def visible(self, values: dict[str, float]) -> dict[str, float]:
        """Return only the values that may be seen."""
        return metric_policy.visible(
            values,
            training_data_is_public=self._train_is_public,
            evaluation_data_is_public=self._evaluation_is_public,
        )

    def wants(self, step: int) -> bool:
        """Whether the metrics of `step` are recorded."""
        every = self._config.evaluation.record_every_steps
        return self._train_is_public and (step == 0 or (every > 0 and step % every == 0))

    def note(self, step: int, values: dict[str, float]) -> None:
        """Append the values that may be seen to the series."""
        for name, value in self.visible(values).items():
            self.series.setdefault(name, []).append((step, value))

    def wants_scores(self, step: int) -> bool:
        """Whether the iterate after `step` steps is scored during the training."""
        every = self._config.evaluation.score_every_steps
        return every > 0 and step % every == 0

    def note_during(self, step: int, scores: dict[str, float]) -> None:
        """Append the scores of the iterate after `step` steps that are declared as a series."""
        during = {f"{name}{metric_policy.DURING}": score for name, score in scores.items()}
        self.note(step, {name: score for name, score in during.items() if name in metric_policy.METRICS})

    def record_groups(
        self, step: int, batch_size: int, num_grouped: int, reports: list[GroupReport], workers: Workers
    ) -> None:
        """Record loss, norms and counts of one step, summed over the workers; all workers must call it.

        Args:
          step: the step, counted from 0.
          batch_size: number of records, or slots, that this worker drew.
          num_grouped: number of records in this worker's contributing groups.
          reports: the reports of this worker's microbatches.
          workers: the training's workers.
        """
        columns = (
            [r.norms.nan_to_num(0, 0, 0) for r in reports],
            [r.losses for r in reports],
            [r.non_finite for r in reports],
            [self._mark_clipped(r) for r in reports],
            [_contributing_groups(r) for r in reports],
        )
        parts = [torch.cat([torch.zeros(0), *(part.cpu() for part in column)]) for column in columns]
        counts = torch.tensor([num_grouped, batch_size]).double()
        sums = torch.cat([torch.stack([part.double().sum() for part in parts]), counts])
        workers.sum_shares(sums)
        norm_sum, loss_sum, num_masked, num_clipped, num_groups, num_records, total_batch_size = sums.tolist()
        values = {
            "realised_batch_size": total_batch_size,
            "num_groups": num_groups,
            "num_non_finite_groups": num_masked,
        }
        if num_groups:
            values["train_loss"] = loss_sum / num_records
            if self._config.mechanism.is_private:
                values["mean_group_grad_norm"] = norm_sum / num_groups
                values["clip_fraction"] = num_clipped / num_groups
        self.note(step, values)

    def _mark_clipped(self, report: GroupReport) -> Tensor:
        """Mark the groups whose gradient, or a separately clipped part of it, exceeded its bound."""
        if report.part_ratios is not None:
            return (report.part_ratios > 1).any(1)
        return report.norms > self._config.mechanism.l2_clip_norm

    def record_snr(self, step: int, clean_norm: float, bare_norm: float | None, noise_norm: float) -> None:
        """Record SNR as DP-GCL defines it: norm of the clipped sum before noise over the norm of the noise.

        Args:
          step: the step, counted from 0.
          clean_norm: norm of the clipped sum before noise.
          bare_norm: the same norm without augmented negatives, at the first step; None at other steps.
          noise_norm: norm of the step's noise.
        """
        self.note(step, {"snr": clean_norm / noise_norm})
        if bare_norm is not None:
            first = {
                "snr_first_step": clean_norm / noise_norm,
                "snr_first_step_no_augmentation": bare_norm / noise_norm,
            }
            self.final.update(self.visible(first))

    @property
    def records_snr(self) -> bool:
        """Whether the SNR is defined, because noise is added."""
        return self._config.mechanism.is_private

    def releases_noised_snr(self, step: int) -> bool:
        """Whether the noised SNR of `step` is released: only of the first step, if requested and charged."""
        is_requested = self._config.evaluation.snr_noise_multiplier is not None
        return is_requested and step == 0 and self._config.mechanism.is_private

    def record_noised_snr(self, clean_norm: float, num_weights: int, generator: Draws) -> None:
        """Record the noised norm of the clipped sum over the public σΔ√d, the noise's root-mean-square norm.

        σ is the noise multiplier, Δ the sensitivity and d the number of weights. The norm of the drawn noise
        would disclose more than the noisy sum does.

        Args:
          clean_norm: norm of the clipped sum before noise.
          num_weights: d.
          generator: a secret generator, other than the generator of the step's noise.
        """
        multiplier = self._config.evaluation.snr_noise_multiplier
        if multiplier is None:
            return
        mechanism = self._config.mechanism
        released = noised_norm(clean_norm, mechanism.sensitivity, multiplier, generator)
        expected = mechanism.noise_multiplier * mechanism.sensitivity * math.sqrt(num_weights)
        self.final.update(self.visible({"noised_snr_first_step": released / expected}))


@dataclass(kw_only=True)
class ObservedStep:
    """The values of one step for the observer (`dpgcl_core.private_step.StepObserver`).

    The first worker adds the squared norms of all shares. So a released norm is of the whole sum, and
    gets its noise there, once.

    Attributes:
      observer: records the values.
      step: the step, counted from 0.
      workers: the training's workers.
      randomness: the source of the noise on values that are released besides the sum.
      norm_without_augmentation: function of some groups, called on every worker, that returns the norm, in
        this worker's share, of their clipped sum before noise, without augmentation.
    """

    observer: Observer
    step: int
    workers: Workers
    randomness: DrawSource
    norm_without_augmentation: Callable[[DrawnGroups], float]
    _norms: tuple[float, float | None] | None = None

    def on_clipped_sum(self, groups: DrawnGroups, reports: list[GroupReport], total: Tensor) -> None:
        observer, step = self.observer, self.step
        if observer.wants(step):
            observer.record_groups(step, groups.batch_size, groups.num_grouped, reports, self.workers)
            if observer.records_snr:
                bare_norm = self._norm_of_all(self.norm_without_augmentation(groups)) if step == 0 else None
                self._norms = self._norm_of_all(float(torch.linalg.vector_norm(total))), bare_norm
        if observer.releases_noised_snr(step):
            clean_norm = self._norm_of_all(float(torch.linalg.vector_norm(total)))
            if self.workers.rank == 0:
                generator = self.randomness.generator(step, "snr noise")
                observer.record_noised_snr(clean_norm, len(total), generator)

    def on_noise(self, norm: float) -> None:
        if self._norms is not None:
            noise_norm = self._norm_of_all(norm)
            if noise_norm > 0:  # only on the first worker; an audit may run a step without noise
                self.observer.record_snr(self.step, *self._norms, noise_norm)

    def _norm_of_all(self, norm: float) -> float:
        """Return on the first worker the norm of a vector from the norms in the workers' shares; else 0."""
        square = torch.tensor([norm**2], dtype=torch.float64)
        self.workers.sum_shares(square)
        return math.sqrt(square.item())


def _contributing_groups(report: GroupReport) -> Tensor:
    return torch.ones_like(report.norms) if report.complete is None else report.complete.float()
