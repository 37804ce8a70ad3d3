"""`python -m dpgcl_core.ledger`: a ledger's caps, charges and remaining budgets, and its verification.

Pass the ledger as `--ledger` or set `$DPGCL_LEDGER`: a path, or a SQLite or PostgreSQL URL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dpgcl_core.command_line import run_command
from dpgcl_core.errors import ConfigError, LedgerError, exit_on_bad_input
from dpgcl_core.ledger.chain import RECORD, Entry, Head, checked_entries

if TYPE_CHECKING:  # the commands load the accountants and the database, but their help does not
    from dpgcl_core.ledger.ledger import Ledger
    from dpgcl_core.ledger.report import Charges

_LARGE_EPSILON = 50.0


def show_command(
    ledger: str | None = None, dataset: str | None = None, pld: bool = True, statement: bool = False
) -> None:
    """Show caps, charges and the ledger's head.

    Args:
      ledger: path or URL; default $DPGCL_LEDGER.
      dataset: one data set's id; all data sets by default.
      pld: compute the PLD total, for information; it may take a while.
      statement: print the data set's lines of a privacy statement instead, as JSON for `verify --against`.
    """
    budget_ledger = _open_ledger(ledger)
    if statement:
        if dataset is None:
            raise ConfigError("--statement needs one data set; pass --dataset")
        print(budget_ledger.statement(dataset).to_json())
        return
    for dataset_id in (dataset,) if dataset else budget_ledger.dataset_ids():
        print(*_lines(budget_ledger.read_charges(dataset_id, with_pld=pld)), sep="\n")
    print(_head_line(budget_ledger.head()))


def remaining_command(
    ledger: str | None = None,
    dataset: str | None = None,
    epsilon: float | None = None,
    expected_batch_size: float = 512,
    num_steps: int = 100,
    delta: float | None = None,
    json: bool = False,
) -> None:
    """Show the remaining budget in the unit of the rule and, if ε is given, in trainings of that ε.

    Args:
      ledger: path or URL; default $DPGCL_LEDGER.
      dataset: one data set's id; all data sets by default.
      epsilon: ε of one training, by PLD, to print how many more such trainings the cap admits.
      expected_batch_size: B of that training.
      num_steps: T of that training.
      delta: δ of that training; 1/(n ln n) by default, as in sweeps.
      json: print one JSON object per data set.
    """
    from dpgcl_core.ledger.remaining import Training, remaining_of

    budget_ledger = _open_ledger(ledger)
    for dataset_id in (dataset,) if dataset else budget_ledger.dataset_ids():
        training = None
        if epsilon is not None:
            n = budget_ledger.num_records_public(dataset_id)
            training = Training.of(n, expected_batch_size, num_steps, epsilon, delta)
        remaining = remaining_of(budget_ledger, dataset_id, training)
        for line in [remaining.to_json()] if json else remaining.lines():
            print(line)


def verify_command(
    ledger: str | None = None,
    against: Path | None = None,
    export: Path | None = None,
    data: Path | None = None,
) -> None:
    """Check every row, every hash and every admission.

    Args:
      ledger: path or URL; default $DPGCL_LEDGER.
      against: a privacy statement or a sweep's plan (JSON); detects a truncated tail and a rewritten chain.
      data: the data set's file or folder; compare the ledger with its marks, and name the missing rows.
      export: check this file, written by `export`, instead of a ledger.
    """
    from dpgcl_core.ledger.report import read_head, verified

    head = read_head(against) if against else None
    if export and data:
        raise ConfigError("an export can be compared only with --against; leave --data out")
    verification = verified(_exported(export) if export else _open_ledger(ledger).entries(), head)
    if data:
        _check_marks(_open_ledger(ledger), data)
    for note in verification.notes:
        print(f"note: {note}")
    witnesses = [name for name, path in (("statement", against), ("marks", data)) if path]
    ways = "--against" if export else "--against or --data"
    compared = f"; pass {ways} to detect a truncated tail"
    if witnesses:
        compared = f" and agrees with the {' and the '.join(witnesses)}"
    print(f"{_head_line(verification.head)}\nthe chain is intact{compared}")


def cap_command(
    dataset: str,
    epsilon: float,
    ledger: str | None = None,
    delta: float | None = None,
    num_records_public: int | None = None,
    unit: str = RECORD,
    order: float | None = None,
    planned: tuple[tuple[float, float], ...] = (),
    quota: tuple[tuple[float, float, int], ...] = (),
    sealed_epsilon: float = 0.0,
    sealed_delta: float = 0.0,
    allow_raise: bool = False,
    create: bool = False,
) -> None:
    """Register a data set with its cap, or change the ε of a registered one.

    Args:
      dataset: the data set's id.
      epsilon: the cap's ε.
      ledger: path or URL; default $DPGCL_LEDGER.
      delta: the cap's δ; at most 1/num_records_public. For a new data set.
      num_records_public: declared public number of records. For a new data set.
      unit: the meaning of one record, such as "person". For a new data set.
      order: the RDP filter's order; chosen automatically by default. For a new data set.
      planned: pairs of sampling_prob and noise_multiplier: the planned steps, which the order is fitted to.
        For a new data set.
      quota: triples of sampling_prob, noise_multiplier and num_steps: step quotas instead of the RDP
        filter. For a new data set.
      sealed_epsilon: part of ε set aside for sealed sweeps by basic composition. For a new data set.
      sealed_delta: part of δ set aside for them. For a new data set.
      allow_raise: let a registered data set's ε grow; every statement will contain the highest ε.
      create: create the ledger if there is none.
    """
    from dpgcl_core.accounting.filters import StepClass
    from dpgcl_core.ledger.cap import Cap
    from dpgcl_core.ledger.ledger import Ledger
    from dpgcl_core.mechanism.numbers import check_delta

    url = _url(ledger)
    new_only = [delta, num_records_public, order, planned or None, quota or None]
    budget_ledger = None if create else _open_ledger(ledger)
    if budget_ledger is not None and dataset in budget_ledger.dataset_ids():
        if any(value is not None for value in new_only):
            raise ConfigError(
                f"data set {dataset!r} is registered: only epsilon can change. Leave the other options out"
            )
        budget_ledger.change_cap(dataset, epsilon, allow_raise=allow_raise)
    elif delta is None or num_records_public is None:
        raise ConfigError(f"data set {dataset!r} is new; pass --delta and --num-records-public")
    else:
        if sum((bool(planned), bool(quota), order is not None)) > 1:
            raise ConfigError("--planned, --order and --quota exclude each other; pass only one of them")
        sealed = {"sealed_epsilon": sealed_epsilon, "sealed_delta": sealed_delta}
        if planned:
            cap = Cap.for_steps(epsilon, delta, [StepClass(*steps) for steps in planned], **sealed)
        else:
            quotas = tuple((StepClass(prob, noise), num_steps) for prob, noise, num_steps in quota)
            cap = Cap(epsilon=epsilon, delta=delta, order=order, quotas=quotas, **sealed)
        check_delta(delta, num_records_public)
        budget_ledger = budget_ledger or Ledger.create(url)  # after all checks: no empty ledger is left
        budget_ledger.register(dataset, cap, num_records_public=num_records_public, unit=unit)
    print(*_lines(budget_ledger.read_charges(dataset, with_pld=False)), sep="\n")
    if epsilon > _LARGE_EPSILON:
        print(f"note: ε = {epsilon:g} guarantees almost nothing")


def export_command(output: Path, ledger: str | None = None, with_trusted: bool = False) -> None:
    """Write all rows as JSON lines, which `verify --export` can check.

    Args:
      output: the file to write; it must not exist yet.
      ledger: path or URL; default $DPGCL_LEDGER.
      with_trusted: include the parts of rows of version 0.1.0 that exports omit; keep such a file on the
        trusted side.
    """
    entries = _open_ledger(ledger).entries()
    try:
        with output.open("x") as file:
            for entry in entries:
                row = {"number": entry.number, "text": entry.text, "entry_hash": entry.entry_hash}
                trusted = {"trusted": entry.trusted_text} if with_trusted and entry.trusted_text else {}
                file.write(json.dumps(row | trusted) + "\n")
    except OSError as error:
        raise LedgerError(f"{output} cannot be written ({error.strerror}); pass another --output") from error
    print(f"{len(entries)} rows written to {output}")


def restored_command(
    dataset: str,
    ledger: str | None = None,
    data: Path | None = None,
    against: Path | None = None,
    close: bool = False,
    used_since: bool = False,
) -> None:
    """State that rows of a data set are lost for good, and continue with the remaining ledger.

    Use this if the ledger was restored from an older copy or started anew, and no newer copy exists. The loss
    is recorded in the ledger. The whole cap is charged for it, up to the highest ε ever registered, because
    the lost rows may have used it up. Later, only the amount that a raised cap adds is admitted. Trainings
    reserved so far cannot resume. If a lost row had raised the cap, raise the cap again first.

    Args:
      dataset: the data set's id.
      ledger: path or URL; default $DPGCL_LEDGER.
      data: the data set's file or folder, whose marks name the lost rows. The marks are updated.
      against: a sweep's plan or a privacy statement that names lost rows.
      close: admit no more charges to the data set, whatever the cap.
      used_since: the data set was charged in this ledger after the rows were lost; add the cap to these
        charges.
    """
    if data is None and against is None:
        raise ConfigError("nothing names the lost rows. Pass --data PATH, or --against PLAN_OR_STATEMENT")
    from dpgcl_core.ledger.report import read_head

    budget_ledger = _open_ledger(ledger)
    heads = budget_ledger.heads_of_marks(dataset, data) if data else []
    budget_ledger.state_loss(
        dataset, heads + ([read_head(against)] if against else []), close=close, used_since=used_since
    )
    if data:
        budget_ledger.bind(dataset, data)
    print(*_lines(budget_ledger.read_charges(dataset, with_pld=False)), sep="\n")


def _check_marks(ledger: Ledger, data: Path) -> None:
    owner = ledger.owner_of(data)
    if owner is None:
        raise LedgerError(f"{data} has no mark")
    for note in ledger.check_marks(owner, data):
        print(f"note: {note}")


def _exported(path: Path) -> Iterator[Entry]:
    try:
        values = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [(v["number"], v["text"], v["entry_hash"], v.get("trusted")) for v in values]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} is not an export of a ledger ({type(error).__name__})") from error
    return checked_entries(rows, with_trusted=False)


def _open_ledger(ledger: str | None) -> Ledger:
    from dpgcl_core.ledger.ledger import Ledger

    return Ledger.open(_url(ledger))


def _url(ledger: str | None) -> str:
    url = ledger or os.environ.get("DPGCL_LEDGER")
    if not url:
        raise ConfigError("no ledger is set. Pass --ledger or set $DPGCL_LEDGER to a path or a database URL")
    return url


def _lines(charges: Charges) -> Iterator[str]:
    cap = charges.cap
    yield charges.title
    if charges.rdp is not None and charges.rdp_budget is not None:
        yield f"  charged: RDP {charges.rdp:.6g} of {charges.rdp_budget:.6g}"
    quotas = dict(cap.quotas)
    for step_class in {**quotas, **charges.num_steps}:
        of = f" of {quotas[step_class]}" if step_class in quotas else ""
        yield f"  {step_class.text}: {charges.num_steps.get(step_class, 0)}{of} steps"
    if charges.num_sealed:
        how = "by RDP curves (part of the RDP above)" if charges.rdp is not None else "by basic composition"
        yield f"  sealed sweeps: {charges.num_sealed}, charged {how}"
    if cap.sealed_epsilon:
        yield (
            f"  charged to the share for sealed sweeps (basic composition): ({charges.sealed_epsilon:g}, "
            f"{charges.sealed_delta:g}) of ({cap.sealed_epsilon:g}, {cap.sealed_delta:g})"
        )
    if charges.num_losses:
        yield "  rows were lost: " + (
            "the data set is closed for good" if charges.closed else "the whole cap is charged for them"
        )
    yield f"  reservations: {charges.num_open} open, {charges.num_settled} settled"
    totals = f"ε = {charges.epsilon_filter:.6g} by the filter"
    if charges.epsilon_pld is not None:
        totals += f", {charges.epsilon_pld:.6g} by PLD"
    yield f"  charged so far, for information: {totals}, at δ = {cap.delta:.4g}; the guarantee is the cap"


def _head_line(head: Head) -> str:
    return f"ledger {head.ledger_id}: {head.num_entries} rows, head {head.head_hash}"


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code; raise errors that a user can correct."""
    commands: dict[str, Callable[..., None]] = {
        "show": show_command,
        "remaining": remaining_command,
        "verify": verify_command,
        "cap": cap_command,
        "export": export_command,
        "restored": restored_command,
    }
    run_command(commands, prog="python -m dpgcl_core.ledger", description=__doc__, arguments=arguments)
    return 0


if __name__ == "__main__":
    exit_on_bad_input(main)
