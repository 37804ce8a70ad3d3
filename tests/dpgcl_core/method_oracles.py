"""Every method's clipped sum, slowly: one float64 backward pass per term, and the law of clipping.

A method of the registry that trains needs an entry in `CASES`; `test_methods_oracle.py` fails without one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import GAMMA
from dpgcl_core.clipping.types import Embed, Objective, num_trainable, trainable_parameters
from dpgcl_core.losses.objective import EmbeddingObjective
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper
from tests.dpgcl_core.adversary import embed_of
from tests.dpgcl_core.dpcl_oracle import GivenNormals, Normals, slow_barlow, slow_nt_xent
from tests.dpgcl_core.logit_oracle import coefficients
from tests.oracles import group_info_nce

TAU, BIAS, NOISE = 0.3, -1.0, 1.5
OF_ONE_RECORD = 0.5
"""What the embeddings of a task of one record are to become, in place of what its own network rebuilds."""
SETTINGS = LossSettings(temperature=TAU, bias=BIAS)
MARGIN = 1 - 1e-4
NUM_RECORDS, DELTA = 1000, 1e-4


@dataclass(frozen=True)
class Term:
    """One term: it adds weight·factor(norm)·gradient."""

    gradient: Tensor
    weight: Tensor | float = 1.0
    norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step sees: a float64 network, views `[groups, size, views, ...]`, and noise of its own."""

    mechanism: Mechanism
    model: nn.Module
    views: Tensor
    target: nn.Module
    normals: Sequence[Normals] = ()
    graph: bool = False

    def gradient(self, value: Tensor) -> Tensor:
        """The flat gradient of one number."""
        parameters = trainable_parameters(self.model)
        found = torch.autograd.grad(value, parameters, create_graph=self.graph, retain_graph=True)
        return torch.cat([g.flatten() for g in found])

    @property
    def records(self) -> Tensor:
        return self.views.flatten(0, 1)

    def embed(self, records: Tensor) -> Tensor:
        return embed_of(self.model)(records[None])[0]


Terms = Callable[[Step], Iterator[Term]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """How one method is tested.

    Attributes:
      terms: its terms, by the slow way.
      shape: groups, records of a group and views of a record.
      fields: of the mechanism, beyond the common ones.
      normals: how many numbers its own noise takes, for records and dimensions.
    """

    terms: Terms
    shape: tuple[int, int, int] = (3, 2, 3)
    fields: dict[str, object] = field(default_factory=dict)
    normals: Callable[[int, int], tuple[int, ...]] = lambda records, dim: ()


def clipped_sum(step: Step, terms: Terms) -> Tensor:
    """Σ weight·factor(norm)·gradient, float64."""
    mechanism, total = step.mechanism, torch.zeros(num_trainable(step.model), dtype=torch.float64)
    for term in terms(step):
        norm = term.gradient.norm() if term.norm is None else term.norm
        bound = mechanism.l2_clip_norm * MARGIN
        if math.isinf(bound):
            factor: Tensor | float = 1.0
        elif mechanism.clipping == "automatic":
            factor = bound / (norm + GAMMA)
        else:
            factor = bound / norm.clamp_min(bound)
        total = total + term.weight * factor * term.gradient
    return total


def _info_nce(step: Step) -> Iterator[Term]:
    for group in step.views:
        z = step.embed(group)
        yield Term(step.gradient(group_info_nce(z[:, 0], z[:, 1], z[:, 2:], TAU)))


def _sigmoid(step: Step) -> Iterator[Term]:
    for group in step.views:
        z, loss = step.embed(group), 0.0
        for i in range(len(z)):
            for j in range(len(z)):
                for key in z[j, 1:]:
                    logit = (1 if i == j else -1) * (z[i, 0] @ key / TAU + BIAS)
                    loss = loss + torch.log(1 + torch.exp(-logit))
        yield Term(step.gradient(loss))  # type: ignore[arg-type]


def _byol(step: Step) -> Iterator[Term]:
    for group in step.views:
        z = step.embed(group)
        with torch.no_grad():
            goals = embed_of(step.target)(group[None])[0]
        loss = torch.zeros((), dtype=z.dtype)
        for i in range(len(z)):
            for v in range(z.shape[1]):
                for w in range(z.shape[1]):
                    if v != w:
                        loss = loss + (z[i, v] - goals[i, w]).square().sum()
        yield Term(step.gradient(loss))


def _of_one_record(step: Step) -> Iterator[Term]:
    """A loss that sees one record, as those of methods that clip each by itself do."""
    for record in step.records:
        loss = torch.zeros((), dtype=record.dtype)
        for z in step.embed(record[None])[0]:
            for number in z:
                loss = loss + (number - OF_ONE_RECORD) ** 2
        yield Term(step.gradient(loss))


def _own_paths(step: Step) -> Iterator[Term]:
    others = _without_weights(step)
    for own in range(len(step.records)):
        z = torch.cat([others[:own], step.embed(step.records[own][None]), others[own + 1 :]])
        yield Term(step.gradient(group_info_nce(z[:, 0], z[:, 1], z[:, 2:], TAU)))


def _without_weights(step: Step) -> Tensor:
    """Embeddings that do not remember the weights, though they do the inputs."""
    frozen = copy.deepcopy(step.model).requires_grad_(False)
    return embed_of(frozen)(step.records[None])[0]


def _through_the_batch(step: Step) -> Iterator[Term]:
    size = step.views.shape[1]
    z = step.embed(step.records)
    for start in range(0, len(z), size):
        loss = torch.zeros((), dtype=z.dtype)
        for i in range(start, start + size):
            logits = torch.stack([z[i, 0] @ key for j in range(len(z)) for key in z[j, 1:]]) / TAU
            loss = loss - torch.log(torch.exp(z[i, 0] @ z[i, 1] / TAU) / torch.exp(logits).sum())
        yield Term(step.gradient(loss))


def _pairs(spread_out: float) -> Terms:
    def terms(step: Step) -> Iterator[Term]:
        plain = LogitClipper(logit_clip_norm=1.0, temperature=TAU, spread_out=spread_out)
        z = step.embed(step.records)
        weights = coefficients((z[:, 0] @ z[:, 1].T).detach(), plain)
        for i in range(len(z)):
            for j in range(len(z)):
                query, key = z[i, 0], z[j, 1]
                whole = step.gradient(query @ key)
                parts = (step.gradient(query @ key.detach()), step.gradient(query.detach() @ key))
                yield Term(whole, weights[i, j], parts[0].norm() + parts[1].norm())

    return terms


def _views(step: Step, z: Tensor, loss: Tensor) -> Iterator[Term]:
    (cotangents,) = torch.autograd.grad(loss, z, create_graph=step.graph)
    views = step.records.flatten(0, 1)
    for view, cotangent in zip(views, cotangents.flatten(0, -2), strict=True):
        yield Term(step.gradient((step.model(view[None])[0] * cotangent).sum()))


def _leaf(step: Step) -> Tensor:
    z = _without_weights(step)
    return z if z.requires_grad else z.requires_grad_()


def _simclr(step: Step) -> Iterator[Term]:
    z = _leaf(step)
    views = z.flatten(0, 1)
    similarities = views @ views.T
    if step.normals:
        std = step.mechanism.noise_multiplier * 4 * math.sqrt(len(views) - 1)
        similarities = similarities + std * torch.from_numpy(step.normals[0]).view_as(similarities)
    return _views(step, z, slow_nt_xent(similarities, TAU))


def _barlow(step: Step) -> Iterator[Term]:
    z = _leaf(step)
    noise = [torch.zeros(2, z.shape[2], dtype=z.dtype) for _ in range(2)]
    for index, sensitivity in enumerate((2 / len(z), 6) if step.normals else ()):
        drawn = torch.from_numpy(step.normals[index]).view(2, -1)
        noise[index] = step.mechanism.noise_multiplier * sensitivity * drawn
    return _views(step, z, slow_barlow(z, *noise, variance_floor=1e-3, off_diagonal_weight=5e-3))


_IN_GROUPS = {"group_size": 2}
_ALL = {"group_size": "batch"}
_CAPPED = _ALL | {"batch_cap": 40}
_LOGIT = _CAPPED | {"temperature": TAU}


def _similarities(records: int, dim: int) -> tuple[int, ...]:
    return ((2 * records) ** 2,)


def _statistics(records: int, dim: int) -> tuple[int, ...]:
    return (2 * dim, 2 * dim)


CASES: dict[str, Case] = {
    "dp_gcl": Case(terms=_info_nce, fields=_IN_GROUPS),
    "dp_clip": Case(terms=_info_nce, shape=(1, 4, 3), fields=_ALL),
    "dp_sgd": Case(terms=_own_paths, shape=(1, 4, 3), fields=_CAPPED),
    "group_clip": Case(terms=_through_the_batch, fields=_IN_GROUPS | {"batch_cap": 40}),
    "logit_dp": Case(terms=_pairs(0.0), shape=(1, 3, 2), fields=_LOGIT),
    "logit_dp_spread_out": Case(terms=_pairs(1.0), shape=(1, 3, 2), fields=_LOGIT),
    "dpcl_simclr": Case(terms=_simclr, shape=(1, 4, 2), fields=_ALL, normals=_similarities),
    "dpcl_barlow": Case(terms=_barlow, shape=(1, 4, 2), fields=_ALL, normals=_statistics),
    "dpcl_simclr_rigorous": Case(terms=_simclr, shape=(1, 4, 2), fields=_ALL),
    "dpcl_barlow_rigorous": Case(terms=_barlow, shape=(1, 4, 2), fields=_ALL),
    "siglip_groups": Case(terms=_sigmoid, fields=_IN_GROUPS),
    "byol_groups": Case(terms=_byol, shape=(3, 1, 2), fields={"group_size": 1}),
    "dp_mae": Case(terms=_of_one_record, shape=(3, 1, 2), fields={"group_size": 1}),
    "dp_cap": Case(terms=_of_one_record, shape=(3, 1, 2), fields={"group_size": 1}),
    "dp_classifier": Case(terms=_of_one_record, shape=(3, 1, 2), fields={"group_size": 1}),
    "non_private": Case(
        terms=_info_nce,
        shape=(1, 4, 3),
        fields=_ALL | {"noise_multiplier": 0.0, "l2_clip_norm": math.inf},
    ),
}
TRAINING = [name for name, method in METHODS.items() if method.trains]
"""`base` has no step whose sum could be compared."""


def mechanism_of(name: str, *, records: int = 4, **changes: object) -> Mechanism:
    """A mechanism of the method whose batches hold `records` on average."""
    values: dict[str, object] = {
        "num_records_public": NUM_RECORDS,
        "sampling_prob": records / NUM_RECORDS,
        "l2_clip_norm": 1.0,
        "noise_multiplier": NOISE,
        "num_steps": 20,
        "target_delta": DELTA,
    }
    values |= changes | CASES[name].fields
    return Mechanism(method=name, **values)  # type: ignore[arg-type]


def target_of(model: nn.Module) -> nn.Module:
    """A network beside `model` that is not it."""
    target = copy.deepcopy(model).requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for value in target.parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator).to(value))
    return target


def rule_sum(
    mechanism: Mechanism,
    model: nn.Module,
    views: Tensor,
    normals: Sequence[Normals] = (),
    target: nn.Module | None = None,
) -> Tensor:
    """What the mechanism's own rule adds up, as float64."""
    total = torch.zeros(num_trainable(model))
    embed: Embed = embed_of(model)
    if mechanism.rules.needs_target:
        assert target is not None
        own, beside = embed_of(model), embed_of(target)
        embed = lambda x: torch.cat([own(x), beside(x).detach()], dim=-1)  # noqa: E731
    objective: Objective = EmbeddingObjective(embed=embed, loss=mechanism.loss(SETTINGS))
    if mechanism.rules.task:
        objective = lambda x: (embed(x) - OF_ONE_RECORD).square().sum((1, 2, 3))  # noqa: E731
    mechanism.rule(SETTINGS).add_clipped_sum(total, model, objective, views, draws=GivenNormals(*normals))
    return total.double()
