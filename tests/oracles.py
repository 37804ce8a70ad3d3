"""Slow, obvious reference versions of what the library does fast."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn


def group_info_nce(queries: Tensor, keys: Tensor, augmented: Tensor | None, temperature: float) -> Tensor:
    """Eq. 12 of DP-GCL for one group, term by term: `[size, dim]`, `[size, dim]`, `[size, copies, dim]`."""
    loss = torch.zeros(())
    size = len(queries)
    for i in range(size):
        denominator = torch.zeros(())
        for j in range(size):
            denominator = denominator + torch.exp(_cosine(queries[i], keys[j]) / temperature)
            if augmented is not None:
                for copy in augmented[j]:
                    denominator = denominator + torch.exp(_cosine(queries[i], copy) / temperature)
        loss = loss - torch.log(torch.exp(_cosine(queries[i], keys[i]) / temperature) / denominator)
    return loss


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a.norm() * b.norm())


def clipped_sum(
    model: nn.Module, group_losses: Callable[[Tensor], Tensor], inputs: Tensor, l2_clip_norm: float
) -> Tensor:
    """Σ Clip_C(∇L_G), one group at a time, in float64 after the backward pass."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for group in inputs:
        gradients = torch.autograd.grad(group_losses(group[None]).sum(), parameters)
        flat = torch.cat([g.flatten().double() for g in gradients])
        norm = flat.norm()
        if torch.isfinite(norm):
            total += flat * min(1.0, l2_clip_norm / float(norm)) if norm > 0 else flat
    return total


Groups = frozenset[frozenset[int]]
Law = dict[Groups, Fraction]


def grouping_law(records: Sequence[int], group_size: int, *, keep_short_last_group: bool = False) -> Law:
    """The exact law of the set of groups that permuting and cutting `records` gives."""
    counts: Counter[Groups] = Counter()
    for order in itertools.permutations(records):
        end = len(order) if keep_short_last_group else len(order) // group_size * group_size
        cut = (order[i : i + group_size] for i in range(0, end, group_size))
        counts[frozenset(frozenset(group) for group in cut)] += 1
    total = math.factorial(len(records))
    return {groups: Fraction(count, total) for groups, count in counts.items()}


def positional_shard_law(
    records: Sequence[int], group_size: int, num_shards: int, shard_of: Callable[[int, int], int]
) -> Law:
    """The law of the groups when every shard permutes and cuts its own records.

    `shard_of(position, record)` assigns a record; using the position is the defect to be shown.
    """
    shards = [
        [r for position, r in enumerate(records) if shard_of(position, r) == shard]
        for shard in range(num_shards)
    ]
    law: Law = {frozenset(): Fraction(1)}
    for shard in shards:
        parts = grouping_law(shard, group_size)
        joint: Counter[Groups] = Counter()
        for groups, p in law.items():
            for part, q in parts.items():
                joint[groups | part] += p * q
        law = dict(joint)
    return law


def num_changed_groups(first: Groups, second: Groups) -> int:
    """Largest possible ‖Σ h(G) − Σ h(G')‖ / C over all h with ‖h‖ ≤ C: one C per group not in both."""
    return len(first ^ second)


def coupling_distance(first: Law, second: Law, bound: int) -> Fraction:
    """Largest mass that some coupling of two laws can put on pairs at most `bound` changed groups apart.

    A maximum flow between the two laws; 1 means that a coupling within the bound exists.
    """
    import networkx as nx

    scale = math.lcm(*(p.denominator for p in (*first.values(), *second.values())))
    graph = nx.DiGraph()
    for groups, p in first.items():
        graph.add_edge("source", ("first", groups), capacity=int(p * scale))
    for groups, p in second.items():
        graph.add_edge(("second", groups), "sink", capacity=int(p * scale))
    for a, b in itertools.product(first, second):
        if num_changed_groups(a, b) <= bound:
            graph.add_edge(("first", a), ("second", b), capacity=scale)
    flow, _ = nx.maximum_flow(graph, "source", "sink")
    return Fraction(int(flow), scale)


def clipped_sum_by_parts(
    model: nn.Module,
    group_losses: Callable[..., Tensor],
    groups: Sequence[Tensor | tuple[Tensor, ...]],
    part_of: Callable[[str], int],
    l2_clip_norm: float,
    gamma: float | None = None,
) -> Tensor:
    """Σ over groups and parts of Clip_{C/√m}(∇_p L_G): one group and one name at a time, in float64."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    bound = l2_clip_norm / math.sqrt(len({part_of(name) for name, _ in named}))
    sums = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in named}
    for group in groups:
        loss = group_losses(group).sum()
        found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        gradients = {
            name: torch.zeros(p.numel()).double() if g is None else g.flatten().double()
            for (name, p), g in zip(named, found, strict=True)
        }
        if not all(bool(torch.isfinite(g).all()) for g in gradients.values()):
            continue
        squares: Counter[int] = Counter()
        for name, g in gradients.items():
            squares[part_of(name)] += float(g.square().sum())  # type: ignore[assignment]
        for name, g in gradients.items():
            norm = math.sqrt(squares[part_of(name)])
            if gamma is not None:
                sums[name] += g * bound / (norm + gamma)
            else:
                sums[name] += g * min(1.0, bound / norm) if norm > 0 else g
    return torch.cat([sums[name] for name, _ in named])
