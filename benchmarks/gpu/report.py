"""One page and one figure of the results of a device, drawn from its JSON alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.gpu.slices import PARTS, read_heading, read_rows
from benchmarks.harness import Row, markdown_table, ratio_text, say, side_text, with_spread
from dpgcl_core.errors import ConfigError

PAGE, FIGURE = "report.md", "steps.png"
_SCORES = {
    "knn_accuracy": "k-NN",
    "linear_probe_accuracy": "Linear probe",
    "zero_shot_accuracy": "Zero-shot",
    "image_to_text_recall_at_10": "Image → text, recall at 10",
    "text_to_image_recall_at_10": "Text → image, recall at 10",
    "next_token_accuracy": "Next token",
}
_FACTS = {
    "driver": "driver {}",
    "torch": "torch {}",
    "cuda": "CUDA {}",
    "max_sm_clock_mhz": "at most {:g} MHz",
    "max_memory_clock_mhz": "memory at most {:g} MHz",
    "power_limit_watts": "power limit {:g} W",
    "default_power_limit_watts": "by default {:g} W",
    "max_power_limit_watts": "at most {:g} W",
    "memory_bytes": "{:.3g} bytes of memory",
}


@dataclass(frozen=True)
class Report:
    """Write the page and the figure of a folder of results."""

    folder: tyro.conf.Positional[Path]
    """Where python -m benchmarks.gpu has kept them."""


def write_report(options: Report) -> int:
    """Write both files into the folder, print the page and return 0.

    Raises:
      ConfigError: the folder holds no results, or damaged ones.
    """
    heading = read_heading(options.folder)
    parts = {part: list(read_rows(options.folder, part).values()) for part in PARTS}
    if not any(parts.values()):
        raise ConfigError(f"{options.folder} holds no finished slice yet: run python -m benchmarks.gpu first")
    text = page_of(heading, parts)
    (options.folder / PAGE).write_text(text)
    print(text)
    _draw(options.folder / FIGURE, parts["b"])
    return 0


def page_of(heading: Row, parts: Mapping[str, Sequence[Row]]) -> str:
    """Return the page in Markdown: the device, a table per part, and what was skipped or has failed.

    Args:
      heading: of the results.
      parts: the rows of each part.
    """
    known = {name: heading.get(name) for name in _FACTS}
    told = [text.format(known[name]) for name, text in _FACTS.items() if known[name] is not None]
    size = ", at toy size: no measurement" if heading["toy"] else ""
    lines = [f"# {heading['device_name']}{size}", f"{', '.join(told)}; version {heading['version']}."]
    for part, rows in parts.items():
        finished = [row for row in rows if "found" in row]
        if finished:
            lines += [f"## Part {part}: {PARTS[part]}", *_TABLES[part](finished)]
    others = [row for rows in parts.values() for row in rows if "found" not in row]
    if others:
        lines += ["## Not measured", *map(_not_measured, others)]
    return "\n\n".join(lines) + "\n"


def _not_measured(row: Row) -> str:
    why = "skipped" if "skipped" in row else "failed"
    return f"- Part {row['part']}, {row['name']}: {why}, {row[why]}"


def _of_checks(rows: Sequence[Row]) -> Iterable[str]:
    lines = [
        [row["name"], ", ".join(f"{name}: {value:.4g}" for name, value in row["found"].items()) or "holds"]
        for row in rows
    ]
    yield markdown_table(["check", "measured"], lines)


def _of_steps(rows: Sequence[Row]) -> Iterable[str]:
    columns = ["network", "precision", "B", "S", "private", "other side", "", "time", "memory"]
    lines = []
    for found in (row["found"] for row in rows):
        shown = [found["model"], found["precision"], found["expected_batch_size"], found["group_size"]]
        for name, ratio in found["over"].items():
            sides = [
                side_text(found["sides"]["ours"]),
                name.replace("_", " "),
                side_text(found["sides"][name]),
            ]
            times = with_spread(ratio["time"], ratio["time_range"])
            lines.append([*shown, *sides, times, ratio_text(ratio["memory"])])
    yield markdown_table(columns, lines)


def _of_trainings(rows: Sequence[Row]) -> Iterable[str]:
    trained = [row["found"] for row in rows if "candidate" in row["found"]]
    for study in dict.fromkeys(found["study"] for found in trained):
        own = [found for found in trained if found["study"] == study]
        yield f"### {study}: {_steps_text(own)}"
        scores = {
            name: title for name, title in _SCORES.items() if any(name in each["metrics"] for each in own)
        }
        lines = [
            [name, len(same), *(_score(same, score) for score in scores)]
            for name in dict.fromkeys(each["candidate"] for each in own)
            for same in [[each for each in own if each["candidate"] == name]]
        ]
        yield markdown_table(["", "seeds", *(f"{title} (%)" for title in scores.values())], lines)


def _steps_text(rows: Sequence[Row]) -> str:
    """T of a study, and whether it was cut.

    >>> _steps_text([{"num_steps": 800, "wanted_steps": 1200}])
    'T = 800, cut from 1200 to fit into a slice'
    """
    taken, wanted = rows[0]["num_steps"], rows[0]["wanted_steps"]
    return f"T = {taken}" + (f", cut from {wanted} to fit into a slice" if taken < wanted else "")


def _score(rows: Sequence[Row], name: str) -> str:
    """Mean and standard error in percent.

    >>> _score([{"metrics": {"a": 0.5}}, {"metrics": {"a": 0.7}}], "a")
    '60.0 ± 10.0'
    """
    values = [100 * row["metrics"][name] for row in rows if name in row["metrics"]]
    if not values:
        return "–"
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{error}"


_TABLES = {"a": _of_checks, "b": _of_steps, "c": _of_trainings, "d": _of_trainings, "e": _of_trainings}


def _draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw the ratios of part b, where there are any and the library that draws them is there."""
    points = points_of(rows)
    if not points:
        return
    try:
        import vl_convert  # the figure is made where the package is installed, not on the GPU machine
    except ImportError:
        say("no figure: vl-convert is not installed here")
        return
    path.write_bytes(vl_convert.vegalite_to_png(specification(points), ppi=200))
    print(f"written: {path}")


def points_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one point per measured ratio of part b."""
    return [
        {
            "network": f"{found['model']}, {found['precision']}, over {name.replace('_', ' ')}",
            "B": found["expected_batch_size"],
            "S": str(found["group_size"]),
            "time": ratio["time"],
            "low": ratio["time_range"][0],
            "high": ratio["time_range"][1],
        }
        for found in (row["found"] for row in rows if "found" in row)
        for name, ratio in found["over"].items()
    ]


def specification(points: Sequence[Row]) -> dict[str, Any]:
    """Return the figure in Vega-Lite: the ratio of times against B, a line per S, a panel per network."""
    across = {"field": "B", "type": "quantitative", "scale": {"type": "log", "base": 2}, "title": "B"}
    colour = {"field": "S", "type": "nominal", "title": "S"}
    up = {"type": "quantitative", "title": "private over other side, time", "scale": {"zero": False}}
    shared = {"x": across, "color": colour}
    return {
        "data": {"values": [*points]},
        "facet": {"field": "network", "type": "nominal", "title": None, "columns": 2},
        "spec": {
            "width": 260,
            "height": 180,
            "layer": [
                {
                    "mark": {"type": "line", "point": True},
                    "encoding": {**shared, "y": {"field": "time", **up}},
                },
                {
                    "mark": "rule",
                    "encoding": {**shared, "y": {"field": "low", **up}, "y2": {"field": "high"}},
                },
            ],
        },
    }
