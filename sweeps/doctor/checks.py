"""The checks: each turns what was seen into findings, and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dpgcl_core.errors import DpgclError
from dpgcl_core.ledger.ledger import Ledger
from sweeps.doctor.findings import Finding, note, ok, skipped, wrong
from sweeps.doctor.nodes import NodeFacts
from trainers.tracking.server import connect, database_file, is_database

_CLOCK_SECONDS = 1.0
_FREE_BYTES, _FEW_BYTES = 2 * 10**9, 20 * 10**9
_GB = 10**9


def check_versions(nodes: Sequence[NodeFacts], driver: NodeFacts) -> list[Finding]:
    """Refuse programs of other versions than the driver's, and other copies of this code."""
    found = []
    for program, version in driver.versions.items():
        other = {node.name: node.versions.get(program, "") for node in nodes}
        odd = {name: each for name, each in other.items() if each != version}
        if odd:
            seen = ", ".join(f"{each or 'none'} on {name}" for name, each in odd.items())
            fix = "install the versions of constraints.txt on every node, and start Ray there again"
            found.append(wrong("versions", f"{program} is {version or 'missing'} here, and {seen}", fix))
    if not found:
        shown = ", ".join(f"{program} {version}" for program, version in driver.versions.items())
        found.append(ok("versions", f"{shown}, on {_nodes(nodes)}"))
    return [*found, _check_code(nodes, driver)]


def _check_code(nodes: Sequence[NodeFacts], driver: NodeFacts) -> Finding:
    odd = [node.name for node in nodes if node.code != driver.code]
    if odd:
        return wrong(
            "code",
            f"{', '.join(odd)} imports another copy of this package than this machine, or none",
            "submit with --working-dir ., which sends this copy along, or bring every node's copy up to date",
        )
    return ok("code", f"{driver.code or 'none'}, on {_nodes(nodes)}")


def check_nodes(nodes: Sequence[NodeFacts], silent: Sequence[str]) -> Finding:
    """Refuse a cluster with nodes that do not answer."""
    if silent:
        fix = "look at `ray status`, and at the raylet's log on that node; end or replace the node"
        return wrong("ray", f"no answer from {', '.join(silent)}", fix)
    return ok("ray", f"{_nodes(nodes)} answered")


def check_gpus(nodes: Sequence[NodeFacts]) -> Finding:
    """Refuse nodes on which torch sees fewer GPUs than Ray counts."""
    with_gpus = [node for node in nodes if node.num_gpus]
    if not with_gpus:
        return skipped("gpu", "Ray counts none on the nodes that are up")
    short = [node for node in with_gpus if (node.num_gpus_seen or 0) < node.num_gpus]
    if short:
        seen = ", ".join(f"{node.num_gpus_seen} of {node.num_gpus:g} on {node.name}" for node in short)
        fix = "install a driver and a build of torch with CUDA there (docs/gpu.md): nvidia-smi must list all"
        return wrong("gpu", f"torch sees fewer GPUs than Ray counts: {seen}", fix)
    return ok("gpu", f"torch sees all {sum(node.num_gpus for node in with_gpus):g}")


def check_clocks(nodes: Sequence[NodeFacts]) -> Finding:
    """Note clocks that are apart for more than the measurement can explain."""
    asked = [(node, node.offset_seconds) for node in nodes if node.offset_seconds is not None]
    if not asked:
        return skipped("clock", "no node was asked")
    late = [
        f"{node.name} by {offset:+.1f} s"
        for node, offset in asked
        if abs(offset) - node.offset_error_seconds > _CLOCK_SECONDS
    ]
    if late:
        fix = "run chrony or systemd-timesyncd on every node: logs and runs are compared by their times"
        return note("clock", f"differs from this machine's: {', '.join(late)}", fix)
    most = max(abs(offset) + node.offset_error_seconds for node, offset in asked)
    return ok("clock", f"at most {most:.2g} s from this machine's")


def check_disks(nodes: Sequence[NodeFacts], meaning: Mapping[str, str]) -> list[Finding]:
    """Refuse folders that are nearly full.

    Args:
      nodes: with the free bytes of each folder.
      meaning: of the folders, by path.
    """
    found = []
    for folder, what in meaning.items():
        free = {node.name: node.free_bytes[folder] for node in nodes if folder in node.free_bytes}
        if not free:
            continue
        name, least = min(free.items(), key=lambda each: each[1])
        text = f"{what}, {folder}: {least / _GB:.3g} GB free on {name}"
        fix = "make room, or name another folder: a checkpoint is as large as the network and its optimizer"
        if least < _FREE_BYTES:
            found.append(wrong("disk", text, fix))
        else:
            found.append(note("disk", text, fix) if least < _FEW_BYTES else ok("disk", text))
    return found


def check_data(nodes: Sequence[NodeFacts], driver: NodeFacts) -> Finding:
    """Refuse data that the driver cannot read; the nodes get the records from the driver."""
    if driver.sees_data is None:
        return skipped("data", "a built-in data set, or none was given (--dataset)")
    blind = [node.name for node in nodes if not node.sees_data]
    if not driver.sees_data:
        where = "no node sees it, either" if len(blind) == len(nodes) else "some nodes see it"
        fix = "give the path as the driver's machine sees it: a job's driver runs on the head node"
        return wrong("data", f"this machine cannot read the data; {where}", fix)
    if blind:
        return note("data", f"{', '.join(blind)} cannot read the data, and need not: the driver sends them")
    return ok("data", f"this machine and {_nodes(nodes)} can read them")


def check_ports(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Refuse nodes that do not reach each other; note what answers beyond the loopback address."""
    apart = [f"{node.name} → {name} ({why})" for node in nodes for name, why in node.unreached.items()]
    found = []
    if apart:
        fix = "let the nodes reach each other on all ports, and nobody else (a security group, a firewall)"
        found.append(wrong("ports", f"no connection {', '.join(apart)}", fix))
    elif len(nodes) > 1:
        found.append(ok("ports", "each node reaches the next one on a port of its choice"))
    else:
        found.append(skipped("ports", "one node has nobody to reach"))
    open_ports = {node.name: node.listens for node in nodes if node.listens}
    if open_ports:
        seen = "; ".join(f"{name}: {', '.join(each)}" for name, each in open_ports.items())
        fix = "close the cluster's network to all others: not all of Ray's ports ask for a token"
        found.append(note("open ports", f"beyond the loopback address Ray answers on {seen}", fix))
    return found


def check_tracking(uri: str) -> Finding:
    """Refuse an MLflow that does not answer; a database that is not there yet will be made."""
    if uri.lower().startswith("sqlite") and not database_file(uri).exists():
        return ok("mlflow", "a database of this machine's, which the first sweep makes")
    kind = "database" if is_database(uri) else "server"
    return _answers("mlflow", lambda: connect(uri), f"the {kind} answers", "start it (`make services`)")


def check_ledger(url: str | None) -> Finding:
    """Refuse a ledger that does not answer."""
    if url is None:
        return skipped("ledger", "none was given (--ledger, $DPGCL_LEDGER); private data need one")
    return _answers("ledger", lambda: Ledger.open(url).head(), "it answers", "see docs/ledger.md")


def _answers(check: str, ask: Callable[[], object], text: str, fix: str) -> Finding:
    try:
        ask()
    except DpgclError as error:
        return wrong(check, str(error), fix)
    return ok(check, text)


def _nodes(nodes: Sequence[NodeFacts]) -> str:
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
