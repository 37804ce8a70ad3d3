"""The questions that sweeps answer: the axis of each figure, and the columns that split its curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dashboards.compose.axes import Axis, Scale
from dashboards.compose.display_names import (
    column_title,
    symbol,
)
from dashboards.compose.transfer_rows import PROBE
from dashboards.dashboard_error import DashboardError
from dpgcl_core.errors import require_choice
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.release.metrics import DURING, Family, find_metric, scores_of

Kind = Literal["axis", "methods", "convergence", "search"]
OPTION_NAMES = ("plain", "ema", "schedule", "automatic-clipping", "warm-start", "all")
SPLITS = ("method", "target_epsilon", "num_augmentations", "sampled")
# In the paper's order; sets of layers that are not listed come next, sorted by name.
ADAPTED_LAYERS = ("Q", "K", "V", "Q+K", "Q+V", "K+V", "Q+K+V")
NETWORKS = (
    *("clip-nano", "clip-tiny", "clip-tiny-patch4", "clip-small"),
    *("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336"),
)
TUNING_STRATEGIES = ("none", "open", "sealed", "public", "scaling")
_IMAGE_AUGMENTATIONS = ("none", "crop", "jitter", "blur")
_TEXT_AUGMENTATIONS = ("none", "sentence swap", "word swap", "word delete")
AUGMENTATIONS = (
    *_IMAGE_AUGMENTATIONS,
    *(f"{image}, {text}" for image in _IMAGE_AUGMENTATIONS for text in _TEXT_AUGMENTATIONS),
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that sweeps answer, and how its figure and its table are made.

    Attributes:
      name: name on the command line; file names have underscores instead of dashes.
      text: the question.
      axis: the axis that the scores are drawn against.
      splits: columns that split the trials into curves if they vary.
      snr: whether the gradient's signal-to-noise ratio has a panel.
      kind: the kind of figure: "axis" for scores against a column, "methods" for the same with a table of
        methods, "convergence" for histories against the training step, "search" for scores against ε.
      series: metrics whose histories are drawn, for "convergence".
      untrained_along: whether the untrained network's scores differ along the axis; they are then drawn as
        points, not as one line.
      is_comparable: whether scores at different values of the axis may be compared.
      heading: the subject, for titles; by default the name in words.
    """

    name: str
    text: str
    axis: Axis
    splits: Sequence[str] = SPLITS
    snr: bool = False
    kind: Kind = "axis"
    series: Sequence[str] = ()
    untrained_along: bool = False
    is_comparable: bool = True
    heading: str = ""

    def __post_init__(self) -> None:
        if not self.heading:
            object.__setattr__(self, "heading", self.name.replace("-", " "))

    @property
    def stem(self) -> str:
        """Name of the question's files, without suffix."""
        return self.name.replace("-", "_")

    @property
    def curve_columns(self) -> list[str]:
        """The columns that split the curves, without the axis's column."""
        return [name for name in self.splits if name != self.axis.column]

    def along(self, column: str) -> Question:
        """Return the same question against another column; categories are sorted by name."""
        axis = replace(self.axis, column=column, label=column_title(column), symbol=symbol(column), order=())
        return replace(self, axis=axis)


def _axis(column: str, scale: Scale, order: Sequence[str] = ()) -> Axis:
    return Axis(column=column, label=column_title(column), symbol=symbol(column), scale=scale, order=order)


_QUESTIONS = (
    Question(name="group-size", text="Which group size?", axis=_axis("group_size", "log2"), snr=True),
    Question(name="batch-size", text="Which batch size?", axis=_axis("expected_batch_size", "log2")),
    Question(
        name="num-augmentations",
        heading="augmented copies",
        text="How many augmented copies?",
        axis=_axis("num_augmentations", "linear"),
    ),
    Question(name="clip-norm", text="Which clip norm?", axis=_axis("l2_clip_norm", "log")),
    # ε depends on σ here, so it must not split the curve.
    Question(
        name="noise-multiplier",
        text="Which noise multiplier?",
        axis=_axis("noise_multiplier", "log"),
        splits=("method", "num_augmentations"),
    ),
    # Each factor has its own ε, which must not split the curve.
    Question(
        name="tan",
        heading="TAN",
        text="Which k to divide B and σ by?",
        axis=_axis("tan_factor", "log2"),
        splits=("method", "num_augmentations", "group_size"),
    ),
    Question(
        name="tuning",
        text="How to tune within one total ε?",
        axis=_axis("tuning", "categorical", TUNING_STRATEGIES),
        splits=("target_epsilon",),
    ),
    Question(name="privacy-budget", text="Which ε?", axis=_axis("target_epsilon", "log")),
    Question(
        name="classify",
        heading="classifiers",
        text="Which ε, and which layers of a classifier?",
        axis=_axis("target_epsilon", "log"),
        splits=("trained_layers", *SPLITS),
    ),
    Question(name="temperature", text="Which temperature?", axis=_axis("temperature", "log")),
    Question(
        name="methods",
        text="Which method?",
        axis=_axis("method", "categorical", tuple(METHODS)),
        # A method has its own N_a, which must not separate its scores from the other methods' scores.
        splits=("target_epsilon",),
        kind="methods",
    ),
    Question(
        name="convergence",
        text="Which method and setting?",
        axis=Axis(column="step", label="Step", symbol="step", scale="linear", dense=True),
        splits=(*SPLITS, "group_size", "expected_batch_size", "temperature", "network_name", "lora_layers"),
        kind="convergence",
        series=(
            *(f"{name}{DURING}" for name in scores_of(*Family) if find_metric(f"{name}{DURING}")),
            "train_loss",
        ),
    ),
    Question(
        name="search",
        text="Which settings?",
        axis=Axis(column="trial_number", label="Trial", symbol="trial", scale="linear", dense=True),
        kind="search",
    ),
    Question(
        name="lora-layers",
        heading="adapted layers",
        text="Which layers to adapt?",
        axis=_axis("lora_layers", "categorical", ADAPTED_LAYERS),
    ),
    Question(
        name="architectures",
        text="Which network?",
        axis=_axis("network_name", "categorical", NETWORKS),
        untrained_along=True,
    ),
    Question(
        name="augmentations",
        text="Which augmentations?",
        axis=_axis("augmentation", "categorical", AUGMENTATIONS),
    ),
    Question(
        name="transfer",
        text="Which method and ε?",
        axis=_axis(PROBE, "categorical"),
        untrained_along=True,
        is_comparable=False,
    ),
    Question(
        name="ablation",
        text="Which option?",
        axis=_axis("option", "categorical", OPTION_NAMES),
        untrained_along=True,  # a warm start is not an untrained network
    ),
)
QUESTIONS = {question.name: question for question in _QUESTIONS}


def find_question(name: str | Question) -> Question:
    """Return the question with this name; a `Question` is returned unchanged.

    Raises:
      DashboardError: there is no question of this name.
    """
    if isinstance(name, Question):
        return name
    require_choice("question", name, QUESTIONS, error=DashboardError)
    return QUESTIONS[name]
