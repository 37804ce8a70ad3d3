#!/usr/bin/env python
"""Compare the cost of Logit-DP with one gradient per pair, and with a DP-GCL step, in one run.

    python benchmarks/logit_dp.py                          # everything, with a dated file
    python benchmarks/logit_dp.py --model tiny_cnn --pair-records 64 --json

All measurements use one thread. The reference computes one gradient for each similarity, by one backward
pass per pair and by `vmap`, for `--reference-rows` rows of n pairs. Every pair costs the same, so its time is
scaled to all n rows. Ratios are ratios of CPU seconds, which other work on the machine disturbs less than
wall-clock seconds; the file has both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Output, Page, Seconds, in_turn, print_line, seconds_text, timed
from benchmarks.steps import IMAGE_SHAPES
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import GroupReport, num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError, exit_on_bad_input
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.losses.objective import EmbeddingObjective
from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper
from trainers.config.networks import NetworkConfig
from trainers.models.encoder import build_encoder

CLIP_NORM = 1.0
TEMPERATURE = 0.5
GROUP_SIZE = 16
SUM_RECORDS = 24
"""The number of records in the check of a clipped sum."""


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure."""

    model: Literal["tiny_cnn", "small_cnn"] = "small_cnn"
    """The network."""
    dim: int = 32
    """Embedding dimension in the comparison with one gradient per pair."""
    step_dims: tuple[int, ...] = (8, 16, 32)
    """Embedding dimensions in the comparison with a DP-GCL step."""
    pair_records: int = 256
    """Number of records n in the comparison with one gradient per pair."""
    step_records: int = 512
    """Number of records n in the comparison with a DP-GCL step."""
    reference_rows: int = 8
    """Number of rows, of n pairs each, that the reference computes."""
    repeats: int = 5
    """Timed rounds of Logit-DP and of DP-GCL."""

    def __post_init__(self) -> None:
        if not 1 <= self.reference_rows <= self.pair_records:
            raise ConfigError(
                f"reference_rows must be in [1, {self.pair_records}]; got {self.reference_rows}"
            )
        if self.step_records % GROUP_SIZE:
            raise ConfigError(f"step_records must be a multiple of {GROUP_SIZE}; got {self.step_records}")


def median_of(rounds: Sequence[Seconds], scale: float = 1.0) -> Seconds:
    """Return the medians, times `scale`."""
    return Seconds(*(scale * statistics.median(column) for column in zip(*rounds, strict=True)))


class Setting:
    """Random images, an encoder of both views, and our step on them."""

    def __init__(self, options: Options, num_records: int, dim: int) -> None:
        shape = IMAGE_SHAPES[options.model]
        config = NetworkConfig(name=options.model, embedding_dim=dim)
        self.model = build_encoder(config, shape, 0)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as the training loop does
        self.dim, self.num_records = dim, num_records
        self.inputs = torch.randn(1, num_records, 2, *shape, generator=torch.Generator().manual_seed(0))
        self.clipper = LogitClipper(logit_clip_norm=CLIP_NORM, temperature=TEMPERATURE)
        self.embed = self._embed  # one object, so that the engines check it only once
        self.losses = EmbeddingObjective(
            embed=self.embed, loss=partial(two_view_group_loss, temperature=TEMPERATURE)
        )

    def _embed(self, inputs: Tensor) -> Tensor:
        embeddings: Tensor = self.model(inputs.flatten(0, 2))
        return embeddings.view(*inputs.shape[:3], -1)

    def take_clipped_sum(self, num_records: int | None = None) -> tuple[Tensor, GroupReport]:
        """Return Logit-DP's clipped sum, and its report."""
        total = torch.zeros(num_trainable(self.model))
        inputs = self.inputs[:, :num_records]
        return total, self.clipper.add_clipped_sum(total, self.model, self.embed, inputs)

    def dp_gcl(self) -> None:
        """Compute DP-GCL's clipped sum of the same views, all groups at once, which is fastest here."""
        groups = self.inputs[0].unflatten(0, (-1, GROUP_SIZE))
        GroupClipper(l2_clip_norm=CLIP_NORM).add_clipped_sum(
            torch.zeros(num_trainable(self.model)), self.model, self.losses, groups
        )

    def record_embeddings(self, num_records: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return queries and keys, each with its own graph, so that a pair's backward pass is no larger."""
        records = self.inputs[0, :num_records]
        queries, keys = ([self.model(record[v : v + 1])[0] for record in records] for v in range(2))
        return queries, keys

    def gradients(self, num_records: int) -> tuple[Tensor, Tensor]:
        """Return both terms of each pair's gradient by `autograd.grad`, `[n, n, num_parameters]` each."""
        parameters = trainable_parameters(self.model)
        queries, keys = self.record_embeddings(num_records)
        terms = []
        for query in queries:
            for key in keys:
                for similarity in (query @ key.detach(), query.detach() @ key):
                    term = torch.autograd.grad(similarity, parameters, retain_graph=True)
                    terms.append(torch.cat([gradient.flatten() for gradient in term]))
        both = torch.stack(terms).view(num_records, num_records, 2, -1).double()
        return both[:, :, 0], both[:, :, 1]

    def norms_by_loop(self, rows: int) -> Tensor:
        """Return norms `[rows, n]`, one pair at a time."""
        parameters = trainable_parameters(self.model)
        queries, keys = self.record_embeddings(self.num_records)
        norms = torch.zeros(rows, self.num_records, dtype=torch.float64)
        for i, query in enumerate(queries[:rows]):
            for j, key in enumerate(keys):
                pair = torch.autograd.grad(query @ key, parameters, retain_graph=True)
                norms[i, j] = torch.stack([g.double().square().sum() for g in pair]).sum().sqrt()
        return norms

    def norms_by_vmap(self, rows: int, at_once: int = 64) -> Tensor:
        """Return the same norms by vectorised gradients of `at_once` pairs at a time."""
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}

        def similarity(weights: dict[str, Tensor], query: Tensor, key: Tensor) -> Tensor:
            z = torch.func.functional_call(self.model, weights, (torch.stack([query, key]),))
            product: Tensor = z[0] @ z[1]
            return product

        gradient = torch.func.vmap(torch.func.grad(similarity), (None, None, 0))
        norms = []
        for query in self.inputs[0, :rows, 0]:
            for keys in self.inputs[0, :, 1].split(at_once):
                found = gradient(weights, query, keys)
                norms.append(sum(g.double().flatten(1).square().sum(1) for g in found.values()).sqrt())
        return torch.cat(norms).view(rows, -1)


def sum_error(setting: Setting) -> float:
    """Return the clipped sum's relative error over one gradient per pair, for a few records, in float64."""
    n = min(SUM_RECORDS, setting.num_records)
    queries, keys = setting.record_embeddings(n)
    z = (torch.stack(queries) @ torch.stack(keys).T).detach().double()
    coefficients = ((z / TEMPERATURE).softmax(1) - torch.eye(n)) / TEMPERATURE
    of_queries, of_keys = setting.gradients(n)
    bounds = of_queries.norm(dim=2) + of_keys.norm(dim=2)
    factor = (CLIP_NORM * (1 - 1e-4) / bounds).clamp_max(1)
    exact = torch.einsum("ij,ijp->p", coefficients * factor, of_queries + of_keys)
    return float((setting.take_clipped_sum(n)[0].double() - exact).norm() / exact.norm())


def _keep(norms: dict[str, Tensor], name: str, take: Callable[[int], Tensor], rows: int) -> None:
    norms[name] = take(rows)


def against_pairs(options: Options) -> dict[str, Any]:
    """Return one row: Logit-DP's step and one gradient per pair."""
    num_records = options.pair_records
    setting = Setting(options, num_records, options.dim)
    _, report = setting.take_clipped_sum()
    rows = options.reference_rows
    norms: dict[str, Tensor] = {}
    sides = {"ours": median_of([timed(setting.take_clipped_sum) for _ in range(options.repeats)])}
    for name, take in (("loop", setting.norms_by_loop), ("vmap", setting.norms_by_vmap)):
        take(1)
        seconds = timed(partial(_keep, norms, name, take, rows))
        sides[name] = median_of([seconds], scale=num_records / rows)
        print_line(f"  {name}: {sides[name].processor:.1f} s for n = {num_records}")
    exact = norms["loop"]
    bounds = report.norms.view(num_records, -1)[:rows]
    fastest = min(sides["loop"].processor, sides["vmap"].processor)
    return {
        "num_records": num_records,
        "dim": options.dim,
        "speedup": fastest / sides["ours"].processor,
        "median_bound": float((bounds / exact).median()),
        "smallest_bound": float((bounds / exact).min()),
        "max_vmap_norm_error": float(((norms["vmap"] - exact) / exact).abs().max()),
        "sum_error": sum_error(setting),
        "sides": {name: seconds._asdict() for name, seconds in sides.items()},
    }


def against_dp_gcl(options: Options, dim: int) -> dict[str, Any]:
    """Return one row: Logit-DP's and DP-GCL's steps, taken in turn."""
    n = options.step_records
    setting = Setting(options, n, dim)
    takes: dict[str, Callable[[], Any]] = {"ours": setting.take_clipped_sum, "dp_gcl": setting.dp_gcl}
    for take in takes.values():
        take()
    found = in_turn({name: partial(timed, take) for name, take in takes.items()}, options.repeats)
    medians = {name: median_of(rounds) for name, rounds in found.items()}
    every = {name: [seconds.processor for seconds in rounds] for name, rounds in found.items()}
    return {
        "num_records": n,
        "dim": dim,
        "group_size": GROUP_SIZE,
        "ratio": medians["ours"].processor / medians["dp_gcl"].processor,
        "ratio_range": harness.ratio_of(every["ours"], every["dp_gcl"])[1:],
        "processor_seconds": {name: seconds.processor for name, seconds in medians.items()},
        "clock_seconds": {name: seconds.clock for name, seconds in medians.items()},
        "all_processor_seconds": every,
    }


def measure(options: Options) -> dict[str, Any]:
    """Return all rows."""
    torch.set_num_threads(1)
    print_line(f"n = {options.pair_records}")
    pairs = [against_pairs(options)]
    steps = []
    for dim in options.step_dims:
        print_line(f"compared with DP-GCL, dim {dim}")
        steps.append(against_dp_gcl(options, dim))
    return {"model": options.model, "pairs": pairs, "steps": steps}


def tables(result: dict[str, Any]) -> list[str]:
    """Return both tables in Markdown."""
    columns = ["n", "dim", "ours", "loop", "vmap", "speedup", "bound / norm", "error of the sum"]
    pairs = [
        [
            row["num_records"],
            row["dim"],
            *(f"{seconds_text(row['sides'][side]['processor'])} s" for side in ("ours", "loop", "vmap")),
            f"**{row['speedup']:.0f}×**",
            f"{row['median_bound']:.2f}",
            f"{row['sum_error']:.0e}",
        ]
        for row in result["pairs"]
    ]
    steps = [
        [
            row["num_records"],
            row["dim"],
            f"{seconds_text(row['processor_seconds']['ours'])} s, "
            + harness.with_spread(row["ratio"], row["ratio_range"]),
            f"{seconds_text(row['processor_seconds']['dp_gcl'])} s",
        ]
        for row in result["steps"]
    ]
    return [
        harness.markdown_table(columns, pairs),
        harness.markdown_table(["n", "dim", "Logit-DP", f"DP-GCL, S = {GROUP_SIZE}"], steps),
    ]


def main() -> int:
    """Measure everything."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=1)
    result = measure(options)
    page = Page(name=f"logit_dp_{options.model}", title="Logit-DP without n² gradients", text=PAGE)
    return harness.publish(page, options, facts, result, tables(result))


PAGE = f"""
Median CPU seconds of one thread, with all sides in one process. The first table compares Logit-DP (bounds on
the norms of all n² similarity gradients, and their clipped sum) with one gradient per pair (`loop` by
`autograd.grad`, and `vmap`), measured on a few rows of n pairs and scaled to n rows. `speedup` is over the
faster of both. `bound / norm` is the bound that a pair is clipped by, divided by its gradient's norm: the
median over these rows. `error of the sum` is the relative error of the clipped sum of {SUM_RECORDS} records,
compared with float64. The second table compares one clipped sum over n records, with two views each, and
DP-GCL's clipped sum (`GroupClipper`) of the same views and network.
"""


if __name__ == "__main__":
    exit_on_bad_input(main)
