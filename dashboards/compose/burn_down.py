"""What a data set's budget had left after each row of the ledger, in the ledger's own units.

An RDP filter counts RDP at one order, quotas count steps of each class; what a cap sets aside for sealed
sweeps by basic composition is ε. Everything comes from the public part of the rows: of a sealed sweep its one
charge, and nothing of what it did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dashboards.compose.axes import Axis, ticks_of
from dashboards.compose.content import Content, Curve, Panel, Reference, Style, Table
from dashboards.compose.curves import MARKERS, PRIVATE_COLOURS, staircase
from dashboards.dashboard_error import DashboardError
from dpgcl_core.accounting.filters import QuotaFilter
from dpgcl_core.errors import unknown_choice
from dpgcl_core.ledger.account import Account
from dpgcl_core.ledger.books import Books
from dpgcl_core.ledger.chain import Entry

_COLOURS = PRIVATE_COLOURS[:5]
_MOST_DOTS = 60
_ROW = Axis(column="row", label="Row of the ledger", symbol="row", scale="linear", dense=True)
_KINDS = {
    "register": "registered",
    "reserve": "reserved",
    "extend": "extended",
    "settle": "settled",
    "seal": "sealed sweep",
    "cap": "cap changed",
    "loss": "rows lost",
    "fingerprint": "fingerprint",
}


@dataclass(frozen=True, kw_only=True)
class Remainder:
    """Remainder of one budget after a row.

    Attributes:
      unit: of the numbers, for readers.
      budget: its name in a legend.
      amount: never below zero; charges may exceed a cap only by lost rows and overrun reservations.
      whole: all of it.
    """

    unit: str
    budget: str
    amount: float
    whole: float


def burn_down_of(entries: Iterable[Entry], dataset_id: str) -> tuple[Content, pd.DataFrame]:
    """Return the figure of a data set, and its numbers: one row per ledger row and budget.

    Args:
      entries: all rows of the ledger, from `dpgcl_core.ledger.ledger.Ledger.entries`.
      dataset_id: whose budget is shown.

    Raises:
      DashboardError: the ledger does not know the data set.
      LedgerError: the rows contradict each other.
    """
    books, rows = Books(), list[dict[str, Any]]()
    for entry in entries:
        books.apply(entry)
        account = books.accounts.get(dataset_id)
        if account is None or account.rows[-1] != entry.number:
            continue
        event = {"row": entry.number, "time": entry.time, "event": _KINDS.get(entry.kind, entry.kind)}
        event["label"] = _label(books, entry)
        rows += [event | vars(remainder) for remainder in remainders_of(account)]
    if not rows:
        raise DashboardError(unknown_choice("data set in the ledger", dataset_id, books.accounts))
    numbers = pd.DataFrame(rows).rename(columns={"amount": "left"})
    return _content(numbers, books.accounts[dataset_id]), numbers


def remainders_of(account: Account) -> list[Remainder]:
    """Return the remainder of each budget of an account."""
    cap, budget = account.cap, account.cap.filter()
    if isinstance(budget, QuotaFilter):
        steps = account.steps()
        remainders = [
            Remainder(
                unit="Steps left",
                budget=f"q = {step_class.sampling_prob:.4g}, σ = {step_class.noise_multiplier:.4g}",
                amount=float(max(0, quota - steps.get(step_class, 0))),
                whole=float(quota),
            )
            for step_class, quota in cap.quotas
        ]
    else:
        amount = max(0.0, budget.rdp_budget - account.rdp_spent())
        unit = f"RDP left, at order {budget.order:g}"
        remainders = [Remainder(unit=unit, budget="trainings", amount=amount, whole=budget.rdp_budget)]
    if cap.sealed_epsilon:
        whole = cap.sealed_epsilon
        amount = max(0.0, whole - float(account.sealed_spent()[0]))
        remainders.append(Remainder(unit="ε left", budget="sealed sweeps", amount=amount, whole=whole))
    return remainders


def _label(books: Books, entry: Entry) -> str:
    """Return the training or sweep that a row is about; "" of other rows."""
    if "label" in entry.facts:
        return str(entry.facts["label"])
    if "reservation" in entry.facts:
        return books.reservation(entry.facts["reservation"]).label
    return ""


def _content(numbers: pd.DataFrame, account: Account) -> Content:
    places = {name: place for place, name in enumerate(dict.fromkeys(numbers["budget"]))}
    panels = [_panel(rows, numbers["row"], places) for _, rows in numbers.groupby("unit", sort=False)]
    cap = account.cap
    title = f"{account.dataset_id}: what the ledger has left of (ε = {cap.epsilon:g}, δ = {cap.delta:g})"
    return Content(
        title=title,
        subtitle=f"{len(account.rows)} rows, one {account.unit} protected ({account.neighboring_relation})",
        rows=[panels],
        tables=[("Left now; every row of the ledger is in the .csv file", _now_table(numbers))],
        remarks=_notes(account),
    )


def _notes(account: Account) -> list[str]:
    notes = [
        "Solid: what is left; dashed: the whole budget. Steps are charged when they are reserved, and what "
        "was not drawn comes back when a training is settled.",
        "The guarantee is the cap: what is spent under choices that look at results is no (ε, δ) statement.",
    ]
    if account.sealed:
        notes.append(
            "A sealed sweep is one charge, in full from the start; its rows tell nothing of its trainings."
        )
    if account.num_raised:
        notes.append(f"The cap was raised {account.num_raised} times, each a decision outside the guarantee.")
    if account.num_losses:
        notes.append("Rows were lost: all that they may have admitted is charged.")
    return notes


def _panel(rows: pd.DataFrame, numbers: pd.Series, places: Mapping[str, int]) -> Panel:
    ticks = ticks_of(_ROW, numbers)
    curves: list[Curve] = []
    for name, budget_rows in rows.groupby("budget", sort=False):
        place = places[str(name)]
        colour, marker = _COLOURS[place % len(_COLOURS)], MARKERS[place % len(MARKERS)]
        x = [ticks.positions[order] for order in _ROW.orders(budget_rows["row"])]
        lines = (("whole", "dashed", f"{name}, whole budget"), ("left", "solid", f"{name}, left"))
        for column, dash, label in lines:
            style = Style(label=label, colour=colour, marker="", dash=dash)
            curves.append(Curve.of_single(style, *staircase(x, list(budget_rows[column]))))
        if len(budget_rows) <= _MOST_DOTS:
            style = Style(label=f"{name}, left", colour=colour, marker=marker, dash="")
            curves.append(Curve.of_single(style, _row_names(budget_rows), x, list(budget_rows["left"])))
    unit = str(rows["unit"].iloc[0])
    zero_line = Reference(label="nothing left", mean=0.0, standard_error=math.nan, num_repeats=1)
    return Panel(
        legend="Budgets",
        y_label=unit,
        axis=ticks,
        curves=curves,
        references=[zero_line],
    )


def _row_names(rows: pd.DataFrame) -> list[str]:
    events = zip(rows["row"], rows["event"], rows["label"], strict=True)
    return [f"{row}, {event}{': ' * bool(label)}{label}" for row, event, label in events]


def _now_table(numbers: pd.DataFrame) -> Table:
    rows = [
        [
            str(unit),
            str(budget),
            f"{budget_rows['left'].iloc[-1]:.4g}",
            f"{budget_rows['whole'].iloc[-1]:.4g}",
            _share(budget_rows),
        ]
        for (unit, budget), budget_rows in numbers.groupby(["unit", "budget"], sort=False)
    ]
    return Table(heading=["Unit", "Budget", "Left", "Of", "Left (%)"], rows=rows)


def _share(rows: pd.DataFrame) -> str:
    return f"{100 * rows['left'].iloc[-1] / rows['whole'].iloc[-1]:.1f}"
