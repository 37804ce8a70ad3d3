"""Stage 11, metrics: every number a training reports, and who may see it.

A metric is *releasable* when it is post-processing of the private model or of public settings; a *score* is
releasable only when everything it is computed from besides the model (index, gallery, probe training data,
queries) is public; a *noised* number has noise of its own and is charged in ε (see
`dpgcl_core.release.noised_counts`); everything else is *private-only*: it depends on the private records
outside any mechanism. With private data a private-only metric never reaches MLflow, Ray's results, a log or a
file. `visible` is the only gate, and it refuses undeclared names.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from dpgcl_core.errors import ConfigError, unknown_choice


class Release(enum.Enum):
    """Who may see a metric."""

    RELEASABLE = "releasable"
    SCORE = "releasable if scored on public data only"
    NOISED = "noised and charged"
    PRIVATE_ONLY = "private-only"


@dataclass(frozen=True)
class Metric:
    """One declared metric.

    Attributes:
      name: includes the unit; in MLflow behind its `section`.
      release: who may see it.
      meaning: one line for reports.
    """

    name: str
    release: Release
    meaning: str

    @property
    def section(self) -> str:
        """What stands before the name in MLflow: nothing before a score."""
        if self.release is Release.SCORE or self.name.endswith("_accuracy"):
            return ""
        return _PRIVACY if self.release is Release.RELEASABLE else _TRAINING


_PRIVACY, _TRAINING = "privacy.", "training."

_WAYS = {"image_to_text": "images whose caption is", "text_to_image": "captions whose image is"}
_PAIR_SCORES = {
    **{
        f"{way}_recall_at_{k}": f"{what} among the first {k}"
        for way, what in _WAYS.items()
        for k in (1, 5, 10)
    },
    "zero_shot_accuracy": "images nearest to the text of their own class, or for which it is likeliest",
}
"""Scores of networks with an image and a text tower. No recall may be noised: one more record is a candidate
for every query and can change the hit of each, so one record can move the count by more than one."""

_CAPTION_SCORES = {
    "caption_token_probability": "geometric mean of the probabilities of captions' tokens",
    "next_token_accuracy": "tokens of captions that are the likeliest after those before them",
    "word_order_accuracy": "captions likelier than their words in another order, pair by pair",
}
"""Scores of captioners. None may be noised: a caption counts by its length, and by its words' orders."""

CLASSIFIER_SCORE = "classifier_accuracy"
CLASSIFIER_SCORES = {
    CLASSIFIER_SCORE: "images whose own class a classifier finds the likeliest",
    "classifier_balanced_accuracy": "the same, the mean over classes",
    "classifier_auc": "area under the ROC curve of a classifier of two classes",
}
"""Of a classifier alone, whose classes are those that it was trained on."""

FEW_SHOTS = (1, 2, 5, 10)
"""Labelled records per class that a few-shot probe may be fitted on."""

_FEW_SHOT_SCORES = {
    f"few_shot_{count}_accuracy": f"accuracy of a linear probe fitted on {count} of each class"
    for count in FEW_SHOTS
}
_LABEL_SCORES = {
    "knn_accuracy": "k-NN accuracy (k = 3, cosine) on frozen features",
    "linear_probe_accuracy": "linear probe accuracy on frozen features",
    "knn_balanced_accuracy": "k-NN accuracy, the mean over classes",
    "linear_probe_balanced_accuracy": "linear probe accuracy, the mean over classes",
    "linear_probe_auc": "area under the ROC curve of the linear probe of two classes",
    **_FEW_SHOT_SCORES,
}
_SCORES = {
    **_LABEL_SCORES,
    "view_retrieval_top1": "a record's other view found first among all",
    "view_retrieval_top10": "a record's other view found among the first ten",
    **_PAIR_SCORES,
    **_CAPTION_SCORES,
    **CLASSIFIER_SCORES,
}
_BEFORE_TRAINING = {
    "untrained_": "of the network at random weights",
    "public_start_": "of the network at the public weights that it starts from",
    "private_start_": "of the network at the private weights that it starts from",
}
_OF_IMAGES = {
    "raw_pixels_": "of the images' own pixels",
    "hog_": "of histograms of oriented gradients",
}
REFERENCE_PREFIXES = (*_BEFORE_TRAINING, *_OF_IMAGES)
"""What scores of no trained network start with: those that a trained one's are held against."""

_DECLARED = (
    Metric("epsilon", Release.RELEASABLE, "ε of all that is released, at delta, by PLD"),
    Metric("epsilon_rdp", Release.RELEASABLE, "the same by RDP (cross-check)"),
    Metric("epsilon_prv", Release.RELEASABLE, "the same by PRV (cross-check)"),
    Metric("num_steps_done", Release.RELEASABLE, "steps in the trained model"),
    Metric("num_steps_charged", Release.RELEASABLE, "steps in ε: T + R, or those drawn where R is not set"),
    Metric("num_restarts", Release.PRIVATE_ONLY, "times it was resumed: a crash may come of the records"),
    *(Metric(name, Release.SCORE, what) for name, what in _SCORES.items()),
    *(
        Metric(f"{name}_during", Release.SCORE, f"{what}, after a number of steps")
        for name, what in _SCORES.items()
        if name != "view_retrieval_top10"
    ),
    *(
        Metric(f"{prefix}{name}", Release.SCORE, f"{what}, {of}")
        for prefix, of in _BEFORE_TRAINING.items()
        for name, what in _SCORES.items()
    ),
    *(
        Metric(f"{prefix}{name}", Release.SCORE, f"{_SCORES[name]}, {of}")
        for prefix, of in _OF_IMAGES.items()
        for name in _LABEL_SCORES
    ),
    Metric("noised_knn_accuracy", Release.NOISED, "k-NN accuracy on held-out private records, noised"),
    Metric("noised_linear_probe_accuracy", Release.NOISED, "linear probe accuracy on them, noised"),
    Metric("noised_snr_first_step", Release.NOISED, "noised ‖clipped sum‖ / (σΔ√d) at the first step"),
    Metric("snr_first_step", Release.PRIVATE_ONLY, "‖clipped sum‖ / ‖noise‖ at the first step"),
    Metric("snr_first_step_no_augmentation", Release.PRIVATE_ONLY, "the same with num_augmentations = 0"),
    Metric("snr", Release.PRIVATE_ONLY, "‖clipped sum‖ / ‖noise‖ at a step"),
    Metric("train_loss", Release.PRIVATE_ONLY, "mean group loss per record at a step"),
    Metric("clip_fraction", Release.PRIVATE_ONLY, "share of groups whose gradient was clipped"),
    Metric("mean_group_grad_norm", Release.PRIVATE_ONLY, "mean gradient norm of a group before clipping"),
    Metric("realised_batch_size", Release.PRIVATE_ONLY, "records drawn by the sampler at a step"),
    Metric("num_groups", Release.PRIVATE_ONLY, "full groups at a step"),
    Metric("num_non_finite_groups", Release.PRIVATE_ONLY, "groups masked to zero at a step"),
    Metric("train_seconds", Release.PRIVATE_ONLY, "wall-clock seconds of all steps"),
    Metric("step_seconds", Release.PRIVATE_ONLY, "mean wall-clock seconds of a step"),
    Metric("evaluation_seconds", Release.PRIVATE_ONLY, "wall-clock seconds of all evaluations"),
)

_TRANSFER = {
    "transfer_zero_shot_accuracy": "images of one nearest to their class's text",
    **{f"transfer_{name}": f"{what}, on a probing data set" for name, what in _LABEL_SCORES.items()},
}
_DECLARED_PER_DATASET = (
    *(Metric(name, Release.SCORE, what) for name, what in _TRANSFER.items()),
    *(
        Metric(f"{prefix}{name}", Release.SCORE, f"{what}, {of}")
        for prefix, of in _BEFORE_TRAINING.items()
        for name, what in _TRANSFER.items()
    ),
    *(
        Metric(f"{prefix}transfer_{name}", Release.SCORE, f"{_TRANSFER[f'transfer_{name}']}, {of}")
        for prefix, of in _OF_IMAGES.items()
        for name in _LABEL_SCORES
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}
METRICS_PER_DATASET: dict[str, Metric] = {metric.name: metric for metric in _DECLARED_PER_DATASET}
"""Metrics with a value for each probing data set, named metric/data set: `transfer_knn_accuracy/digits`."""


def find_metric(name: str) -> Metric | None:
    """Return the declared metric of a name, or None.

    >>> [find_metric(name) is not None for name in ("knn_accuracy", "transfer_knn_accuracy/digits")]
    [True, True]
    >>> [find_metric(name) is not None for name in ("transfer_knn_accuracy", "knn_accuracy/digits", "loss")]
    [False, False, False]
    """
    base, _, dataset = name.partition("/")
    return METRICS_PER_DATASET.get(base) if dataset else METRICS.get(name)


def tracked_name(name: str) -> str:
    """Return the name that a metric has in MLflow, whose pages open on the first metric by name.

    Scores are bare, and come first; all else stands in a section behind them.

    >>> [tracked_name(name) for name in ("knn_accuracy", "epsilon", "train_loss", "of_somebody_else")]
    ['knn_accuracy', 'privacy.epsilon', 'training.train_loss', 'of_somebody_else']
    """
    metric = find_metric(name)
    return name if metric is None else f"{metric.section}{name}"


def declared_name(tracked: str) -> str:
    """Return the name of a metric from the one that it has in MLflow, now or in earlier versions.

    >>> [declared_name(name) for name in ("privacy.epsilon", "epsilon", "transfer_knn_accuracy/digits")]
    ['epsilon', 'epsilon', 'transfer_knn_accuracy/digits']
    """
    return tracked.removeprefix(_PRIVACY).removeprefix(_TRAINING)


def is_reference(name: str) -> bool:
    """Return whether a score is of no trained network: of untrained weights, or of the images themselves.

    >>> [is_reference(name) for name in ("untrained_knn_accuracy", "hog_knn_accuracy", "knn_accuracy")]
    [True, True, False]
    """
    return name.startswith(REFERENCE_PREFIXES)


def visible(
    values: Mapping[str, float], *, training_data_is_public: bool, evaluation_data_is_public: bool
) -> dict[str, float]:
    """Return the metrics of `values` that may leave the training.

    Args:
      values: metric values by declared name.
      training_data_is_public: whether the training records are public.
      evaluation_data_is_public: whether *all* records the scores were computed from are public.

    Raises:
      ConfigError: a name is not declared; undeclared numbers must not slip through.

    >>> visible({"epsilon": 9.9, "train_loss": 1.0, "knn_accuracy": 0.8},
    ...         training_data_is_public=False, evaluation_data_is_public=True)
    {'epsilon': 9.9, 'knn_accuracy': 0.8}
    """
    shown = {}
    for name, value in values.items():
        metric = find_metric(name)
        if metric is None:
            per_dataset = (f"{each}/DATASET" for each in METRICS_PER_DATASET)
            raise ConfigError(unknown_choice("metric", name, [*METRICS, *per_dataset]))
        release = metric.release
        if (
            release in (Release.RELEASABLE, Release.NOISED)
            or training_data_is_public
            or (release is Release.SCORE and evaluation_data_is_public)
        ):
            shown[name] = float(value)
    return shown
