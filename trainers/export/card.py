"""The model card of an exported model: the content of its statement, for readers who have only the folder."""

from __future__ import annotations

from collections.abc import Sequence

from dpgcl_core.release.markdown import escaped
from dpgcl_core.release.statement import PROVEN, delta_text, epsilon_text
from trainers.export.description import ModelDescription

_NO_GUARANTEE = "none: what this model reveals about its records is not bounded"


def model_card(description: ModelDescription, usage: Sequence[str]) -> str:
    """Return the page in Markdown, a function of the content of `model.json`, which is released.

    Args:
      description: the model's description.
      usage: lines on how to use the folder.
    """
    rows = [f"| {name} | {escaped(value)} |" for name, value in _rows(description)]
    lines = [
        f"# {escaped(description.network)}, trained by {escaped(description.method)}",
        f"**{escaped(description.promise)}**",
        "\n".join(["| | |", "|---|---|", *rows]),
        "## What the numbers mean",
        _meaning(description),
        "## How to use it",
        "\n".join(["```text", *usage, "```"]),
        "The full guarantee, with its theorem and conditions: [privacy statement](privacy_statement.md).",
    ]
    return "\n\n".join(lines) + "\n"


def _rows(description: ModelDescription) -> list[tuple[str, str]]:
    rows = [
        ("Method", f"{description.method}, {description.num_steps} steps"),
        ("Trained on", f"{description.dataset} ({description.data})"),
        ("Input", "images of {} channels, {}×{} pixels".format(*description.image_shape)),
        ("Guarantee", description.guarantee_label),
        ("ε of the whole sweep, including the choice of this model", _epsilon(description.sweep_epsilon)),
        ("δ of the whole sweep", _delta(description.sweep_delta)),
        ("ε of this training alone", _epsilon(description.epsilon)),
        ("Neighbouring data sets", description.neighboring_relation),
        ("Chosen", description.choice),
    ]
    return rows + [(name, f"{value:.4g}") for name, value in sorted(description.scores.items())]


def _epsilon(value: float | None) -> str:
    return _NO_GUARANTEE if value is None else epsilon_text(value)


def _delta(value: float | None) -> str:
    return "none" if value is None else delta_text(value)


def _meaning(description: ModelDescription) -> str:
    if description.sweep_epsilon is None or description.guarantee_label != PROVEN:
        return "There is no (ε, δ) guarantee to rely on. Treat the model as you would treat its data."
    return (
        "ε and δ bound how well anyone who has the model, and everything else that its sweep released, can "
        "distinguish two data sets that differ by one record "
        f"({escaped(description.neighboring_relation)}). Except with a probability of about δ, no outcome "
        "is more than e^ε times likelier with one than with the other. The ε of the whole sweep holds for "
        "this model, since the model was chosen among others. The ε of its training alone does not. Both "
        "cover the records that the model was trained on, and not the images that it is applied to: "
        "embeddings of private images are private data."
    )
