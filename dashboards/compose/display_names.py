"""Names for readers: of data sets, methods, scores, columns and values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.release.metrics import DURING, REFERENCE_PREFIXES, Family, Metric, find_metric, scores_of
from trainers.data.dataset_registry import DATA_SOURCES

SNR = "snr_first_step"
SNR_PLAIN = "snr_first_step_no_augmentation"
SNR_NOISED = "noised_snr_first_step"
UNTRAINED = "untrained"
SWEEP = "sweep"
"""The column of the sweep's name; it distinguishes curves if several sweeps are compared."""

OPTION_TITLES = {
    "ema": "averaged weights",
    "schedule": "learning-rate schedule",
    "automatic-clipping": "automatic clipping",
    "warm-start": "warm start",
}
"""The titles of the ablation's options."""
_SIGNED_COLUMNS = {
    "group_size": ("Group size", "S"),
    "expected_batch_size": ("Expected batch size", "B"),
    "num_augmentations": ("Augmented copies", "Nₐ"),
    "l2_clip_norm": ("Clip norm", "C"),
    "noise_multiplier": ("Noise multiplier", "σ"),
    "target_epsilon": ("Target", "ε"),
    "temperature": ("Temperature", "τ"),
    "tan_factor": ("B and σ divided by", "k"),
    "num_steps": ("Steps", "T"),
}
"""Name and sign of each column that labels such as "S = 8" show by its sign."""
_COLUMN_NAMES = {
    **{column: f"{name} {sign}" for column, (name, sign) in _SIGNED_COLUMNS.items()},
    "sampling_prob": "Sampling probability q",
    "embedding_dim": "Embedding width",
    "network_name": "Network",
    "num_classes": "Classes",
    "optimizer_name": "Optimizer",
    "lora_layers": "Adapted layers",
    "probe_dataset": "Probing data set",
    "num_trials": "Trials",
    "epsilon_max": "Largest ε spent",
}
"""The titles of columns that `_in_words` would name otherwise."""
_WORD_REPLACEMENTS = {
    **{"num": "number of", "prob": "probability", "max": "largest", "min": "smallest", "l2": "L2"},
    **{"ema": "weight-averaging", "lora": "LoRA", "snr": "SNR", "public": "public"},
}
_MOST_NAMES = 5


def has_values(trials: pd.DataFrame, name: str) -> bool:
    """Return whether a column exists and holds any value."""
    return name in trials and bool(trials[name].notna().any())


def score_title(name: str) -> str | None:
    """Return the title of a score, a fraction drawn in per cent, or None for any other column.

    >>> score_title("image_to_text_recall_at_10"), score_title("knn_accuracy_during"), score_title("snr")
    ('Image → text recall at 10', 'k-NN accuracy', None)
    """
    metric = _metric_of(name)
    return metric.title if metric is not None and metric.family is not None else None


def _metric_of(column: str) -> Metric | None:
    """Return the metric of a column; a score during training has the metric of the final score."""
    return find_metric(column.removesuffix(DURING))


def without_prefix(name: str) -> str:
    """Return a score's name without the prefix of a reference, such as `public_start_`, if it has one.

    >>> without_prefix("public_start_knn_accuracy"), without_prefix("knn_accuracy")
    ('knn_accuracy', 'knn_accuracy')
    """
    return next((name.removeprefix(prefix) for prefix in REFERENCE_PREFIXES if name.startswith(prefix)), name)


def score_names(trials: pd.DataFrame) -> list[str]:
    """Return the names of the trials' final scores; of view retrieval only if there are no others."""
    names = [name for name in scores_of(*Family) if has_values(trials, name)]
    views = scores_of(Family.VIEWS)
    return [name for name in names if name not in views] or names


def common_scores(trials: pd.DataFrame) -> list[str]:
    """Return the names of the final scores that every trial has, or of all final scores if there are none.

    >>> common_scores(pd.DataFrame({"zero_shot_accuracy": [0.1, None], "knn_accuracy": [0.5, 0.6]}))
    ['knn_accuracy']
    """
    names = score_names(trials)
    return [name for name in names if trials[name].notna().all()] or names


def panel_scores(names: Iterable[str]) -> list[str]:
    """Return those of the scores, final or during training, that are drawn in a panel.

    >>> panel_scores(["knn_accuracy", "linear_probe_accuracy"])
    ['knn_accuracy', 'linear_probe_accuracy']
    >>> panel_scores(["image_to_text_recall_at_1", "image_to_text_recall_at_10", "knn_accuracy"])
    ['image_to_text_recall_at_10']
    >>> panel_scores(["knn_accuracy", "knn_balanced_accuracy"])
    ['knn_accuracy']
    """
    metrics = {name: _metric_of(name) for name in names}
    in_panels = {name: metric for name, metric in metrics.items() if metric is None or metric.has_panel}
    recalls = [name for name, metric in in_panels.items() if metric and metric.family is Family.PAIRS]
    return recalls or list(in_panels) or list(metrics)


def method_title(name: str) -> str:
    """Return a method's title; the name itself if no such method is registered, as in older runs."""
    return METHODS[name].title if name in METHODS else name


def method_position(name: str) -> int:
    """Return a method's position in tables and figures; unknown methods come last."""
    names = list(METHODS)
    return names.index(name) if name in names else len(names)


def column_title(column: str) -> str:
    """Return a column's name for readers.

    >>> column_title("l2_clip_norm"), column_title("some_new_option")
    ('Clip norm C', 'Some new option')
    """
    metric = _metric_of(column)
    if title := (metric.title if metric is not None else None) or _COLUMN_NAMES.get(column):
        return title
    words = _in_words(column)
    return words[:1].upper() + words[1:]


def _in_words(column: str) -> str:
    """Return a column's name in words.

    >>> [_in_words(name) for name in ("num_noised_scores", "flip_prob", "max_blur_sigma", "some_new_option")]
    ['number of noised scores', 'flip probability', 'largest blur sigma', 'some new option']
    """
    return " ".join(_WORD_REPLACEMENTS.get(word, word) for word in column.split("_"))


def dataset_titles(names: Iterable[str]) -> list[str]:
    """Return the titles of several data sets, distinguished by as much of their paths as necessary.

    >>> dataset_titles(["images:/a/train/scans", "images:/b/public/scans", "cifar10"])
    ['train/scans', 'public/scans', 'CIFAR-10']
    >>> dataset_titles(["images:/a/scans", "images:/b/scans", "images:/a/scans"])
    ['a/scans', 'b/scans', 'a/scans']
    """
    names = list(names)
    titles = [dataset_title(name) for name in names]
    paths = [name.partition(":")[2].replace("\\", "/").rstrip("/").split("/") for name in names]
    for index, (name, title) in enumerate(zip(names, titles, strict=True)):
        namesakes = [i for i, rival in enumerate(names) if rival != name and dataset_title(rival) == title]
        for length in range(2, len(paths[index]) + 1):
            if namesakes and all(paths[i][-length:] != paths[index][-length:] for i in namesakes):
                titles[index] = "/".join(paths[index][-length:])
                break
        else:
            titles[index] = name if namesakes else title
    return titles


def dataset_title(name: str) -> str:
    """Return a data set's name for titles; for your own files, the last part of the path.

    >>> [dataset_title(name) for name in ("cifar10", "shapes:400", "shapes:400:7", "npz:/data/scans.npz")]
    ['CIFAR-10', 'Shapes (400)', 'Shapes (400, seed 7)', 'scans.npz']
    >>> dataset_title("shapes:400:7:common")
    'Shapes (400, seed 7, common words)'
    >>> dataset_title("csv:mine.csv")
    'mine.csv'
    """
    kind, _, numbers = name.partition(":")
    if kind == "shapes" and numbers:
        num_records, *others = numbers.split(":")
        kinds = {"common": "common words", "short": "short captions"}
        words = [kinds.get(other, f"seed {other}") for other in others]
        return f"{DATA_SOURCES[kind].title} ({', '.join([num_records, *words])})"
    last = name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].removeprefix(f"{kind}:")
    return _source_title(last) or last


def _source_title(name: str) -> str:
    source = DATA_SOURCES.get(name.replace("_", "-"))  # earlier versions wrote fashion_mnist
    return source.title if source is not None else ""


def symbol(column: str) -> str:
    """Return a column's symbol in labels such as "S = 8", or its name in words if it has no symbol."""
    return _SIGNED_COLUMNS[column][1] if column in _SIGNED_COLUMNS else _in_words(column)


def value_text(value: Any) -> str:
    """Return a value as text for readers.

    >>> [value_text(value) for value in (1024.0, 0.0707107, float("inf"), "dp_gcl", "batch", None)]
    ['1024', '0.0707107', '∞', 'DP-GCL', 'batch', 'none']
    >>> value_text("shapes:400")
    'Shapes (400)'
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "none"
    if isinstance(value, str):
        if value.startswith("shapes:"):
            return dataset_title(value)
        return _source_title(value) or OPTION_TITLES.get(value) or method_title(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if math.isinf(value):
        return "∞"
    return str(int(value)) if value == int(value) and abs(value) < 1e7 else f"{value:.6g}"


def join_names(names: Sequence[str]) -> str:
    """Return all names in a row, separated unambiguously even if a name holds a comma.

    >>> join_names(["raw pixels", "HOG"]), join_names(["DP-SGD", "DPCL, SimCLR"])
    ('raw pixels, HOG', 'DP-SGD; DPCL, SimCLR')
    """
    return ("; " if any("," in name for name in names) else ", ").join(names)


def list_names(names: Sequence[str]) -> str:
    """Return names as part of a sentence; of many names, only some.

    >>> list_names(["S = 2"]), list_names(["S = 2", "S = 4"]), list_names([str(i) for i in range(9)])
    ('S = 2', 'S = 2 and S = 4', '0, 1, 2, 3, 4 and 4 others')
    >>> list_names(["crop, blur", "crop", "none"])
    'crop, blur; crop; and none'
    >>> list_names(["DP-GCL", "DP-SGD", "DPCL, SimCLR"])
    'DP-GCL; DP-SGD; and DPCL, SimCLR'
    """
    words = list(names) if len(names) <= _MOST_NAMES + 1 else list(names[:_MOST_NAMES])
    sep = "; " if any("," in name for name in words) else ", "
    last = f"{len(names) - _MOST_NAMES} others" if len(words) < len(names) else words.pop()
    return f"{sep.join(words)}{sep.strip() if sep == '; ' else ''} and {last}" if words else last


def natural_key(text: str) -> list[tuple[int, float | str]]:
    """Return a sort key for text that compares its numbers as numbers.

    >>> sorted(["t10", "t9", "b"], key=natural_key)
    ['b', 't9', 't10']
    """
    parts = re.split(r"(\d+)", text)
    return [(0, float(part)) if part.isdigit() else (1, part) for part in parts if part]
