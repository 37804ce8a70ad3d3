"""Stage 11, metrics: every number that a training reports, and who may see it.

A metric is *releasable* if it is post-processing of the private model or of public settings. A *score* is
releasable only if all data that it is computed from besides the model (index, gallery, probe training data,
queries) are public. A *noised* number has its own noise and is charged in ε (see
`dpgcl_core.release.noised_counts`). Every other metric is *private-only*: it depends on the private records
outside any mechanism. With private data, a private-only metric never reaches MLflow, Ray's results, a log or
a file. `visible` is the only gate, and it refuses undeclared names.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from dpgcl_core.errors import ConfigError, unknown_choice


class Release(enum.Enum):
    """Who may see a metric."""

    RELEASABLE = "releasable"
    SCORE = "releasable if scored only on public data"
    NOISED = "noised and charged"
    PRIVATE_ONLY = "private-only"


class Family(enum.Enum):
    """The kind of a score; one scorer computes all scores of a family."""

    CLASSIFIER = "a classifier's own classes"
    PAIRS = "retrieval between images and texts"
    CLASS_NAMES = "images against the texts of class names"
    CAPTIONS = "captions"
    LABELS = "labels, on frozen features"
    NOISED = "held-out private records"
    VIEWS = "views of one record"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One declared metric, with all facts that reports, tables, figures and searches need.

    Attributes:
      name: the metric's name, unit included; in MLflow, its `section` precedes the name.
      release: who may see the metric.
      meaning: an explanation of one line for reports.
      title: the title in tables and figures; empty if the name in words serves as the title.
      unit: "fraction" (shown in per cent), "s" (seconds), or empty for a pure number.
      higher_is_better: the direction; None if no value is better than another.
      family: the family of a score of a finished training's own network; None for all other metrics.
      has_panel: whether figures draw the score; otherwise only tables contain it.
    """

    name: str
    release: Release
    meaning: str
    title: str = ""
    unit: str = ""
    higher_is_better: bool | None = None
    family: Family | None = None
    has_panel: bool = True

    @property
    def section(self) -> str:
        """The prefix of the name in MLflow; empty for a score."""
        if self.release is Release.SCORE or self.name.endswith("_accuracy"):
            return ""
        return _PRIVACY if self.release is Release.RELEASABLE else _TRAINING


_PRIVACY, _TRAINING = "privacy.", "training."
FRACTION, SECONDS = "fraction", "s"
DURING = "_during"
"""The suffix of the name of a score that is computed after a number of steps."""

CLASSIFIER_SCORE = "classifier_accuracy"

_DIRECTIONS = {
    "image_to_text": ("Image → text", "images whose caption is"),
    "text_to_image": ("Text → image", "captions whose image is"),
}
_SCORE_ROWS: dict[Family, tuple[tuple[str, str, str], ...]] = {
    Family.CLASSIFIER: (
        (CLASSIFIER_SCORE, "Classifier accuracy", "images that a classifier assigns to their own class"),
        ("classifier_balanced_accuracy", "Classifier balanced accuracy", "the same, averaged over classes"),
        ("classifier_auc", "Classifier AUC", "area under the ROC curve of a classifier of two classes"),
    ),
    Family.PAIRS: tuple(
        (f"{way}_recall_at_{k}", f"{title} recall at {k}", f"{what} among the first {k}")
        for way, (title, what) in _DIRECTIONS.items()
        for k in (1, 5, 10)
    ),
    Family.CLASS_NAMES: (
        (
            "zero_shot_accuracy",
            "Zero-shot accuracy",
            "images whose nearest, or likeliest, class text is the text of their own class",
        ),
    ),
    Family.CAPTIONS: (
        (
            "caption_token_probability",
            "Probability of a caption's token",
            "geometric mean of the probabilities of captions' tokens",
        ),
        (
            "next_token_accuracy",
            "Next-token accuracy",
            "caption tokens that are the likeliest after the preceding tokens",
        ),
        (
            "word_order_accuracy",
            "Word-order accuracy",
            "share of pairs in which a caption is likelier than its words in another order",
        ),
    ),
    Family.LABELS: (
        ("knn_accuracy", "k-NN accuracy", "k-NN accuracy (k = 3, cosine) on frozen features"),
        ("knn_balanced_accuracy", "k-NN balanced accuracy", "k-NN accuracy, averaged over classes"),
        ("linear_probe_accuracy", "Linear probe accuracy", "linear probe accuracy on frozen features"),
        (
            "linear_probe_balanced_accuracy",
            "Linear probe balanced accuracy",
            "linear probe accuracy, averaged over classes",
        ),
        (
            "linear_probe_auc",
            "Linear probe AUC",
            "area under the ROC curve of the linear probe of two classes",
        ),
    ),
    # Only accuracies on labels may be noised. One more record is a candidate for every query, so it can
    # change the hits of all recalls; a caption's weight depends on its length and on its words' orders.
    Family.NOISED: (
        ("noised_knn_accuracy", "Noised k-NN accuracy", "k-NN accuracy on held-out private records, noised"),
        (
            "noised_linear_probe_accuracy",
            "Noised linear probe accuracy",
            "linear probe accuracy on held-out private records, noised",
        ),
    ),
    Family.VIEWS: (
        ("view_retrieval_top1", "View retrieval, top 1", "records whose other view ranks first"),
        (
            "view_retrieval_top10",
            "View retrieval, top 10",
            "records whose other view ranks among the first ten",
        ),
    ),
}
_IN_TABLES_ALONE = ("_balanced_accuracy", "_auc", "_recall_at_1", "_recall_at_5")
_SCORES = tuple(
    Metric(
        name=name,
        release=Release.NOISED if family is Family.NOISED else Release.SCORE,
        meaning=meaning,
        title=title,
        unit=FRACTION,
        higher_is_better=True,
        family=family,
        has_panel=not name.endswith(_IN_TABLES_ALONE),
    )
    for family, rows in _SCORE_ROWS.items()
    for name, title, meaning in rows
)
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
"""The prefixes of scores of untrained networks and raw images, with which trained scores are compared."""


def _derived(score: Metric, name: str, qualifier: str) -> Metric:
    """Return the same score of something other than the finished network, which `qualifier` names."""
    return replace(score, name=name, meaning=f"{score.meaning}, {qualifier}", title="", family=None)


def _references(scores: Iterable[Metric], of_images: Collection[Family]) -> Iterator[Metric]:
    """Yield the scores before training and, for the families `of_images`, of the images themselves."""
    for score in scores:
        prefixes = _BEFORE_TRAINING | (_OF_IMAGES if score.family in of_images else {})
        for prefix, qualifier in prefixes.items():
            yield _derived(score, f"{prefix}{score.name}", qualifier)


_UNNOISED_SCORES = [score for score in _SCORES if score.release is Release.SCORE]


def _number(release: Release, name: str, meaning: str, title: str = "", unit: str = "") -> Metric:
    return Metric(name=name, release=release, meaning=meaning, title=title, unit=unit)


_public = partial(_number, Release.RELEASABLE)
_private = partial(_number, Release.PRIVATE_ONLY)

_DECLARED = (
    replace(_public("epsilon", "ε of everything released, at delta, by PLD", "ε"), higher_is_better=False),
    _public("epsilon_rdp", "the same by RDP (cross-check)"),
    _public("epsilon_prv", "the same by PRV (cross-check)"),
    _public("num_steps_done", "steps in the trained model"),
    _public("num_steps_charged", "steps in ε: T + R, or the steps drawn if R is not set"),
    _private("num_restarts", "number of resumes, which may reveal crashes that records caused"),
    *_SCORES,
    *(
        _derived(score, f"{score.name}{DURING}", "after a number of steps")
        for score in _UNNOISED_SCORES
        if score.name != "view_retrieval_top10"
    ),
    *_references(_UNNOISED_SCORES, (Family.LABELS,)),
    _number(
        Release.NOISED,
        "noised_snr_first_step",
        "noised ‖clipped sum‖ / (σΔ√d) at the first step",
        "Noised gradient SNR, first step",
    ),
    _private("snr_first_step", "‖clipped sum‖ / ‖noise‖ at the first step", "Gradient SNR, first step"),
    _private(
        "snr_first_step_no_augmentation",
        "the same with num_augmentations = 0",
        "Gradient SNR without augmentation",
    ),
    _private("snr", "‖clipped sum‖ / ‖noise‖ at a step"),
    _private("train_loss", "mean group loss per record at a step", "Training loss"),
    _private("clip_fraction", "share of groups whose gradient was clipped", unit=FRACTION),
    _private("mean_group_grad_norm", "mean gradient norm of a group before clipping"),
    _private("realised_batch_size", "records drawn by the sampler at a step"),
    _private("num_groups", "full groups at a step"),
    _private("num_non_finite_groups", "groups masked to zero at a step"),
    _private("train_seconds", "wall-clock seconds of all steps", unit=SECONDS),
    _private("step_seconds", "mean wall-clock seconds of a step", unit=SECONDS),
    _private("evaluation_seconds", "wall-clock seconds of all evaluations", unit=SECONDS),
)

_TRANSFER = [
    replace(score, name=f"transfer_{score.name}", meaning=f"{score.meaning}, on a probing data set")
    for score in _SCORES
    if score.family in (Family.LABELS, Family.CLASS_NAMES)
]
_DECLARED_PER_DATASET = (
    *(replace(score, title="", family=None) for score in _TRANSFER),
    *_references(_TRANSFER, (Family.LABELS,)),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}
METRICS_PER_DATASET: dict[str, Metric] = {metric.name: metric for metric in _DECLARED_PER_DATASET}
"""Metrics with a value for each probing data set, named "metric/data set": `transfer_knn_accuracy/digits`."""


def find_metric(name: str) -> Metric | None:
    """Return the declared metric with a name, or None.

    >>> [find_metric(name) is not None for name in ("knn_accuracy", "transfer_knn_accuracy/digits")]
    [True, True]
    >>> [find_metric(name) is not None for name in ("transfer_knn_accuracy", "knn_accuracy/digits", "loss")]
    [False, False, False]
    """
    base, _, dataset = name.partition("/")
    return METRICS_PER_DATASET.get(base) if dataset else METRICS.get(name)


def tracked_name(name: str) -> str:
    """Return a metric's name in MLflow: scores have no prefix, and all other metrics that of their section.

    MLflow's pages sort metrics by section, and so begin with the scores.

    >>> [tracked_name(name) for name in ("knn_accuracy", "epsilon", "train_loss", "of_somebody_else")]
    ['knn_accuracy', 'privacy.epsilon', 'training.train_loss', 'of_somebody_else']
    """
    metric = find_metric(name)
    return name if metric is None else f"{metric.section}{name}"


def declared_name(tracked: str) -> str:
    """Return a metric's declared name from its name in MLflow, in this version or in earlier versions.

    >>> [declared_name(name) for name in ("privacy.epsilon", "epsilon", "transfer_knn_accuracy/digits")]
    ['epsilon', 'epsilon', 'transfer_knn_accuracy/digits']
    """
    return tracked.removeprefix(_PRIVACY).removeprefix(_TRAINING)


def scores_of(*families: Family) -> list[str]:
    """Return the names of the scores of these families, in the order of the tables.

    >>> scores_of(Family.NOISED)
    ['noised_knn_accuracy', 'noised_linear_probe_accuracy']
    """
    return [metric.name for metric in _SCORES if metric.family in families]


def is_final_score(name: str) -> bool:
    """Return whether a name is that of a score of a finished training's own network, on any data set.

    >>> [is_final_score(name) for name in ("knn_accuracy", "transfer_knn_accuracy/digits", "epsilon")]
    [True, True, False]
    >>> [is_final_score(name) for name in ("untrained_knn_accuracy", "knn_accuracy_during", "snr")]
    [False, False, False]
    """
    metric = find_metric(name)
    is_score = metric is not None and metric.higher_is_better is True
    return is_score and not is_reference(name) and not name.endswith(DURING)


def is_reference(name: str) -> bool:
    """Return whether a score is not of a trained network, but of untrained weights or the images themselves.

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
      evaluation_data_is_public: whether *all* records that the scores were computed from are public.

    Raises:
      ConfigError: a name is not declared; undeclared numbers must not be released.

    >>> visible({"epsilon": 9.9, "train_loss": 1.0, "knn_accuracy": 0.8},
    ...         training_data_is_public=False, evaluation_data_is_public=True)
    {'epsilon': 9.9, 'knn_accuracy': 0.8}
    """
    visible_values = {}
    for name, value in values.items():
        metric = find_metric(name)
        if metric is None:
            per_dataset = (f"{metric_name}/DATASET" for metric_name in METRICS_PER_DATASET)
            raise ConfigError(unknown_choice("metric", name, [*METRICS, *per_dataset]))
        release = metric.release
        if (
            release in (Release.RELEASABLE, Release.NOISED)
            or training_data_is_public
            or (release is Release.SCORE and evaluation_data_is_public)
        ):
            visible_values[name] = float(value)
    return visible_values
