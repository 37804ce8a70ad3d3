"""Private training in your own loop, with any PyTorch model, data loader and optimizer.

    training = make_private(
        model, optimizer, loader, loss=loss, group_size=8, num_steps=200, target_epsilon=8
    )
    for views in training:      # groups of records, drawn in secret
        training.step(views)    # clipped by group, noised, then one step of the optimizer
    print(training.epsilon())

`opacus.PrivacyEngine.make_private` needs a loss per record; this function takes a loss per group of records.

Guarantee. The weights after every step are (`epsilon()`, δ)-differentially private for adding or removing one
record of the loader's data set, with the label of the mechanism's method, as long as

- a record's views are a function of only that record (and of draws that do not depend on other records);
- the loss of a group is a function of only that group's inputs and the model, and is not random. The groups
  are passed one at a time, on copies of the model's weights and buffers, so the model has nothing to mix and
  keeps nothing (`dpgcl_core.clipping.isolation` lists what this cannot detect). With `mixes_no_records=True`
  the groups are passed together. The caller then promises that model and loss mix no records, keep every row
  of a batch in its place and keep nothing. Model and loss are tried on synthetic inputs in both cases, and
  layers that mix records or write their weights are refused by type;
- initial weights and optimizer state contain nothing computed from the records, unless its ε is charged
  elsewhere;
- the weights are changed only by `step`, and nothing else computed from the records is released. Exceptions
  of the data loader and whether a step fails are such outputs, and are not covered (docs/limits.md).

**Proposition.** For every sequence of calls and exceptions, at most `num_steps_taken` draws reach a pass,
each has at most one noise draw, and the optimizer applies a gradient of these draws only after it was
clipped and noised. *Proof.* A draw is counted before its records are read, and is handed out only then.
`step` removes the draw before the first pass, so no draw has two sums and no sum has two noise draws. Between
the draw's passes and the optimizer no call returns: an exception raised there, or by the data loader, ends
the training, clears all gradients, and every later draw and step is refused. At the update each parameter of
the optimizer has the noised gradient or none (`_check_gradients`), and no pass wrote a weight (`unwritten`).
A call that is refused before the first pass leaves the draw open: it has read only the program. ∎
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dpgcl_core.clipping.clipper import FLAT
from dpgcl_core.clipping.cross_record import PROMISE, check_layers, refuse_mixed_groups
from dpgcl_core.clipping.isolation import changed_state, networks_of, unwritten, whole_state
from dpgcl_core.clipping.types import (
    GroupInputs,
    Objective,
    as_inputs,
    set_gradients,
    trainable_parameters,
    zeros_where_incomplete,
)
from dpgcl_core.clipping.verification import Verdicts
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.mechanism.numbers import default_delta, whole_number
from dpgcl_core.mechanism.passes import groups_of_a_pass
from dpgcl_core.noise.chacha20 import SecureRandomness
from dpgcl_core.noise.randomness import DrawSource
from dpgcl_core.private_step import PrivateStep
from dpgcl_core.release.statement import delta_text, epsilon_text
from dpgcl_core.sampling.stage import DrawnGroups

_NUM_PROBE_GROUPS, _PROBE_GROUP_SIZE = 3, 4


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    *,
    loss: Objective,
    group_size: int | Literal["batch"],
    num_steps: int,
    l2_clip_norm: float = 1.0,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    target_delta: float | None = None,
    num_records_public: int | None = None,
    sampling: str | None = None,
    clipping: str = FLAT,
    max_groups_at_once: int | None = None,
    mixes_no_records: bool = False,
) -> PrivateTraining:
    """Return a private training, which draws groups in secret, clips their gradients and adds noise.

    Args:
      model: the network that `loss` calls; its trainable parameters are released.
      optimizer: an optimizer of all trainable parameters of `model`, and of no other network's parameters.
      data_loader: a loader of a data set in which one item is one record: the record's views, as a tensor
        `[views, ...]` or a tuple of such tensors, of one shape for all records. The data set, workers and
        `collate_fn` are used; `collate_fn` is called on one record at a time. The loader's `batch_size` is
        the expected number of records of a step. Its order of records is replaced by secret Poisson
        sampling (see `sampling`). A custom sampler would be ignored, so it raises an error. To train on some
        of the records, use `torch.utils.data.Subset`.
      loss: a function from inputs `[groups, group_size, views, ...]`, or a tuple of such tensors, to losses
        `[groups]`. Each loss depends only on its own group's inputs and draws no random numbers.
      group_size: S, the number of records whose gradient is clipped together, or "batch" for the whole batch.
      num_steps: T, the number of steps that the noise is calibrated for.
      l2_clip_norm: C, bound on one group's gradient norm.
      target_epsilon: ε after T steps, for which the noise is calibrated. Set this or `noise_multiplier`.
      noise_multiplier: σ = noise std / sensitivity.
      target_delta: δ; 1/(N ln N) by default.
      num_records_public: N, the declared public number of records, the most that the data set may hold. By
        default N is the data set's own number of records. That number is then public, and neighbouring data
        sets differ in one record that is zeroed out.
      sampling: the sampled unit, "groups" (sensitivity C) or "records" (2C). The default is groups, or
        records for group_size "batch".
      clipping: "flat", the factor min(1, C/norm), or "automatic", the factor C/(norm + γ) with a constant γ.
      max_groups_at_once: the most groups in one forward and backward pass; by default, about as many as a
        step has. It has an effect only with `mixes_no_records`.
      mixes_no_records: your promise that model and loss, of whatever type, mix no records, keep every row of
        a batch in its place, and keep nothing of the records. Many groups then pass through the model at
        once, which is faster; otherwise one group at a time.

    Returns:
      The training; iterate over it, and call `step` on each batch of groups.

    Raises:
      ConfigError: the numbers contradict each other, a target ε cannot be met, the model or the loss mixes
        records, the optimizer holds parameters outside the model or needs a closure, the records are not
        tensors, the data loader has a custom sampler, or there are several processes.
    """
    n = len(_records_of(data_loader))
    if num_records_public is not None:
        n = whole_number("num_records_public", num_records_public)
    _check_sampler(data_loader)
    assert data_loader.batch_size is not None
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ConfigError(
            "exactly one of target_epsilon and noise_multiplier must be set; "
            f"got {target_epsilon} and {noise_multiplier}"
        )
    mechanism = Mechanism(
        num_records_public=n,
        num_records_from_data=num_records_public is None,
        sampling=sampling,
        sampling_prob=min(1.0, data_loader.batch_size / n),
        group_size=group_size,
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
        num_steps=num_steps,
        target_delta=default_delta(n) if target_delta is None else target_delta,
        clipping=clipping,
    )
    if target_epsilon is not None:
        mechanism = mechanism.calibrated(target_epsilon)
    return PrivateTraining(
        mechanism,
        model,
        optimizer,
        data_loader,
        loss=loss,
        max_groups_at_once=max_groups_at_once,
        mixes_no_records=mixes_no_records,
    )


class PrivateTraining:
    """One private training; iterate over it and call `step` once for every batch of groups.

    Attributes:
      num_steps_taken: number of charged steps. A step is charged when it is drawn, taken or not.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        model: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        *,
        loss: Objective,
        max_groups_at_once: int | None = None,
        mixes_no_records: bool = False,
        randomness: DrawSource | None = None,
    ) -> None:
        """Check everything that can be checked before the first draw.

        Args:
          mechanism: a mechanism whose method clips the gradient of one loss per disjoint group.
          model, optimizer, data_loader, loss, max_groups_at_once, mixes_no_records: as in `make_private`.
          randomness: source of secret draws; by default the cryptographic stream, with exact noise.

        Raises:
          ConfigError: as in `make_private`.
        """
        method = mechanism.rules
        if not method.clips_groups:
            raise ConfigError(
                f"{mechanism.method} does not clip one loss per disjoint group. Use `trainers.train`"
            )
        if mechanism.num_shards > 1:
            raise ConfigError(
                f"shards must be 1, because this training has one process; got {mechanism.num_shards}. Use "
                "`trainers.train` on several workers"
            )
        if max_groups_at_once is not None:
            max_groups_at_once = whole_number("max_groups_at_once", max_groups_at_once)
            if max_groups_at_once < 1:
                raise ConfigError(f"max_groups_at_once must be at least 1; got {max_groups_at_once}")
        self._records = _records_of(data_loader)
        _check_sampler(data_loader)
        method.check_records(mechanism, len(self._records))
        check_layers(model)
        _check_update(optimizer)
        self.num_steps_taken = 0
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._parameters = trainable_parameters(model)
        self._check_gradients()
        self._loader, self._collate = data_loader, _Collate(data_loader.collate_fn, self._records[0])
        at_once = groups_of_a_pass(mechanism, limit=max_groups_at_once) if mixes_no_records else 1
        self._private_step = PrivateStep(
            mechanism=mechanism,
            model=model,
            objective=loss,
            rule=mechanism.rule(  # only clips: the loss is the caller's
                LossSettings(temperature=1.0, groups_at_once=at_once, isolated=not mixes_no_records)
            ),
            groups_at_once=at_once,
            randomness=SecureRandomness() if randomness is None else randomness,
            watch=lambda: unwritten(model, *networks_of(loss)),
        )
        self._open: DrawnGroups | None = None
        self._has_failed, self._lock = False, threading.RLock()  # one draw or step at a time
        self._mixes_no_records, self._loss_verdicts = mixes_no_records, Verdicts[None]()
        _check_single_process()
        self._check_loss([leaf[:, None] for leaf in self._collate.first])
        self._state = whole_state(model, modes=False)  # between steps the caller may change modes

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that draws groups, adds noise and computes ε."""
        return self._private_step.mechanism

    def __iter__(self) -> Iterator[GroupInputs]:
        """Yield the inputs of each remaining step, drawn in secret: `[groups, group_size, views, ...]`.

        The inputs stay on the data loader's device; `step` moves them to the model's device. A draw may hold
        no group: its step must be taken, too, and adds only noise. If groups are sampled, a group that lacks
        a record consists of zeros and contributes nothing.

        Raises:
          ConfigError: the last draw was not followed by its step, the training has failed, a record's shape
            differs from the first record's, or there are several processes.
        """
        self._check_drawable()
        draws, loader = _SecretGroups(self), self._loader
        batches: DataLoader[Any] = DataLoader(
            _OneByOne(self._records),
            batch_sampler=draws,
            collate_fn=self._collate,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )
        batch_iterator = chain.from_iterable([batches])  # starts the loader at the first `next`
        while self.num_steps_taken < self.mechanism.num_steps:
            with self._lock:
                self._check_drawable()
                self.num_steps_taken += 1
                with self._ending_if_it_fails():
                    batch = next(batch_iterator)
                    groups = draws.queue.popleft()
                    inputs = as_inputs([_in_groups(leaf, groups) for leaf in batch])
                    self._open = groups
            yield inputs
        self._check_drawable()

    def step(self, inputs: GroupInputs) -> None:
        """Clip, sum, noise and average the groups' gradients, and take one step of the optimizer.

        Guarantee: the new weights result from one more step of the mechanism, and are (`epsilon()`, δ)-
        differentially private for its neighbouring relation (see `dpgcl_core.mechanism.mechanism`). An error
        in a pass or in the update ends the training: nothing more can be drawn, and this draw stays charged.

        Args:
          inputs: the yielded inputs, perhaps augmented: `[groups, group_size, views, ...]`.

        Raises:
          ConfigError: nothing was drawn since the last step, the number of groups differs, the optimizer does
            not hold exactly the trained parameters or holds a gradient that no step made, the model's buffers
            or submodules were replaced, or model or loss has changed and now mixes groups or is random. These
            errors are raised before any pass, so the call may be repeated. The error that a pass changed the
            model ends the training.
        """
        with self._lock:
            self._step(inputs)

    def _step(self, inputs: GroupInputs) -> None:
        """Check the call, then take the step; the caller holds the lock."""
        _check_single_process()
        self._check_running()
        if self._open is None:
            raise ConfigError("each draw allows one step. Take the next batch of groups from the iteration")
        groups, leaves = self._open, _leaves(inputs)
        if any(leaf.shape[:2] != groups.rows.shape for leaf in leaves):
            raise ConfigError("a step takes exactly the groups that were drawn, all of them and no others")
        self._check_gradients()
        if changed := changed_state(self._model, self._state, modes=False):
            raise ConfigError(
                f"{changed!r} of the model has changed since the training began. Buffers and submodules are "
                "released unprotected. Restore it, and keep scheduled values in a plain attribute"
            )
        self._check_loss(leaves)
        with self._ending_if_it_fails():
            self._open = None
            device = self._parameters[0].device
            self._private_step.take(
                self.num_steps_taken - 1,
                groups,
                lambda rows: as_inputs([leaf[rows].to(device) for leaf in leaves]),
                self._update,
            )

    def _update(self, gradient: Tensor) -> None:
        self._check_gradients()
        set_gradients(self._parameters, gradient)
        self._optimizer.step()
        self._clear_gradients()

    def epsilon(self, num_steps: int | None = None) -> float:
        """Return ε at the mechanism's δ after the steps drawn so far, or after `num_steps` steps.

        It is 0 before the first step, and inf without noise. Source: privacy loss distributions (Koskela et
        al. 2020; Doroshenko et al. 2022).
        """
        steps = self.num_steps_taken if num_steps is None else whole_number("num_steps", num_steps)
        if steps < 0:
            raise ConfigError(f"num_steps must not be negative; got {steps}")
        if not steps:
            return 0.0
        return self.mechanism.epsilon(steps) if self.mechanism.is_private else math.inf

    def statement(self) -> str:
        """Return the guarantee of the current weights in words, with the promises that it depends on."""
        numbers, promise = self.mechanism, "a group's loss depends only on the group's own records"
        if self._mixes_no_records:
            promise = f"each of network and loss {PROMISE}"
        condition = numbers.rules.condition(numbers)
        return (
            f"ε = {epsilon_text(self.epsilon())} at δ = {delta_text(numbers.target_delta)}, label "
            f"{numbers.guarantee_label}, of the weights after {self.num_steps_taken} of {numbers.num_steps} "
            f"steps, to {numbers.neighboring_relation}{condition and f', for {condition}'}. The author of "
            f"the loop promises: {promise}; nothing else is released"
            + (". The training failed. ε does not cover the failure itself." if self._has_failed else ".")
        )

    def _check_loss(self, leaves: Sequence[Tensor]) -> None:
        """Try the loss on synthetic groups shaped like `leaves`; again only if model or loss has changed."""
        size = self.mechanism.group_size
        num_groups = max(_NUM_PROBE_GROUPS, self._private_step.groups_at_once)
        shape = (num_groups, _PROBE_GROUP_SIZE if isinstance(size, str) else size)
        device, generator = self._parameters[0].device, torch.Generator().manual_seed(0)

        def check_loss() -> None:
            inputs, replacements = (
                tuple(_synthetic_leaf(leaf, shape, generator).to(device) for leaf in leaves) for _ in range(2)
            )
            try:
                refuse_mixed_groups(self._model, self._loss, inputs, replacements)
            except ConfigError:
                raise
            except Exception as error:  # a user's model or loss may fail in any way
                raise ConfigError(
                    f"the loss fails on synthetic groups ({type(error).__name__}: {error}). It must accept "
                    "numbers from -30 to 30, the integers 0 and 1, and zeros. A group with an empty slot is "
                    "all zeros"
                ) from error

        shapes_and_dtypes = tuple((leaf.shape[2:], leaf.dtype) for leaf in leaves)
        self._loss_verdicts.of(self._model, self._loss, shapes_and_dtypes, check_loss)

    def _check_drawable(self) -> None:
        _check_single_process()
        self._check_running()
        if self._open is not None:
            raise ConfigError(
                "every draw must be followed by exactly one step, even if it is empty. Call step once for "
                "each batch of groups"
            )

    def _check_running(self) -> None:
        if self._has_failed:
            raise ConfigError(
                "this training has ended with an exception after records were drawn. The guarantee does not "
                f"cover drawing again. Its ε counts {self.num_steps_taken} steps. Start a new training, and "
                "add up both ε"
            )

    @contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._has_failed = True
            self._clear_gradients()
            raise

    def _clear_gradients(self) -> None:
        held = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        for parameter in chain(held, self._model.parameters()):
            parameter.grad = None

    def _check_gradients(self) -> None:
        """Raise ConfigError unless a step of the optimizer would change exactly the trainable parameters."""
        trainable = {id(parameter): parameter for parameter in self._parameters}
        updated = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        if not trainable:
            raise ConfigError("the model has no trainable parameters")
        if trainable.keys() != {id(parameter) for parameter in trainable_parameters(self._model)}:
            raise ConfigError("the model's trainable parameters have changed since the training began")
        model_ids = {id(parameter) for parameter in self._model.parameters()}
        if not updated.keys() <= model_ids:
            raise ConfigError(
                "the optimizer holds parameters that are not the model's. They would be updated without "
                "clipping and noise. Pass only model.parameters(), and combine networks that train together "
                "in one nn.ModuleList"
            )
        if not trainable.keys() <= updated.keys():
            raise ConfigError(
                "the optimizer does not hold all trainable parameters of the model. Pass "
                "model.parameters(), and freeze the other parameters with requires_grad_(False)"
            )
        if any(p.grad is not None for key, p in updated.items() if key not in trainable):
            raise ConfigError(
                "the optimizer holds a frozen parameter whose gradient no private step has made. It would "
                "apply this gradient without clipping and noise. Call optimizer.zero_grad()"
            )


class _SecretGroups:
    """A batch sampler that draws each remaining step's rows in secret; `queue` holds the drawn groups."""

    def __init__(self, training: PrivateTraining) -> None:
        self.queue: deque[DrawnGroups] = deque()
        self._training, self._first = training, training.num_steps_taken

    def __len__(self) -> int:
        return self._training.mechanism.num_steps - self._first

    def __iter__(self) -> Iterator[list[int]]:
        mechanism, private_step = self._training.mechanism, self._training._private_step
        for step in range(self._first, mechanism.num_steps):
            num_records = len(self._training._records)  # the data set may have grown
            mechanism.rules.check_records(mechanism, num_records)
            groups = private_step.draw(step, num_records)
            self.queue.append(groups)
            yield groups.rows.flatten().tolist() or [0]  # row 0 in place of an empty batch


def _records_of(data_loader: DataLoader[Any]) -> Any:
    """Return the loader's data set; raise ConfigError unless it is indexed and not empty."""
    records = data_loader.dataset
    if isinstance(records, IterableDataset) or not hasattr(records, "__len__"):
        raise ConfigError(
            "records are drawn at random, so the data set must have a length and support indexing; got "
            f"{type(records).__name__}"
        )
    if not len(records):
        raise ConfigError("the data set must hold at least one record; it is empty")
    return records


def _check_sampler(data_loader: DataLoader[Any]) -> None:
    """Raise ConfigError if the loader draws batches in a custom way, which secret sampling would replace."""
    sampler: Any = data_loader.sampler
    is_plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement
    )
    if not is_plain or len(sampler) != len(data_loader.dataset):  # type: ignore[arg-type]
        raise ConfigError(
            f"records are drawn in secret, so the data loader's {type(sampler).__name__} would be ignored, "
            "and its selection of records with it. To train on some of the records, use "
            "torch.utils.data.Subset, with or without shuffle=True"
        )
    if data_loader.batch_size is None:
        raise ConfigError(
            "the data loader must have a batch_size, the expected number of records per step, and no "
            "batch_sampler, because records are drawn in secret"
        )
    if type(data_loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"records are drawn in secret, so the __iter__ of {type(data_loader).__name__} would be "
            "ignored. Pass a torch.utils.data.DataLoader"
        )


def _check_update(optimizer: Optimizer) -> None:
    """Raise ConfigError if the optimizer's step needs more than dense gradients."""
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)  # a scheduler wraps the instance's step
    except TypeError:
        raise ConfigError(
            f"{type(optimizer).__name__}.step requires a closure, which would make additional passes over "
            "the records. Use an optimizer whose step needs no closure"
        ) from None
    if isinstance(optimizer, SparseAdam):
        raise ConfigError("SparseAdam requires sparse gradients, and noised gradients are dense. Use Adam")


def _check_single_process() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ConfigError(
            "private training must run in one process; got a torch.distributed group of "
            f"{distributed.get_world_size()}. Draws of several processes cost more than the stated ε"
        )


class _OneByOne(Dataset[Any]):
    """A data set read one record at a time: its own `__getitems__` could let one record affect another."""

    def __init__(self, records: Any) -> None:
        self._records = records

    def __getitem__(self, row: int) -> Any:
        return self._records[row]


class _Collate:
    """Collates each record separately, so that no record affects another record's inputs.

    Attributes:
      first: the collated first record.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], record: Any) -> None:
        self._collate_fn = collate_fn
        self.first = _leaves(collate_fn([record]))

    def __call__(self, records: list[Any]) -> tuple[Tensor, ...]:
        """Return the records, each collated separately, concatenated along the first axis."""
        collated = [self._collate_fn([record]) for record in records]
        try:
            rows = [_leaves(each) for each in collated]
        except ConfigError:
            rows = []
        form = [(leaf.shape, leaf.dtype) for leaf in self.first]
        if not rows or any([(leaf.shape, leaf.dtype) for leaf in leaves] != form for leaves in rows):
            raise ConfigError(
                "every record, collated separately by collate_fn, must have the shapes and dtypes of the "
                "first record. Pad to a length that is fixed before the data are seen"
            )
        return tuple(torch.cat(leaves) for leaves in zip(*rows, strict=True))


def _leaves(batch: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a collated batch."""
    leaves = (batch,) if isinstance(batch, Tensor) else batch
    if not isinstance(leaves, tuple | list) or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise ConfigError(
            "a record must be a tensor [views, ...] or a tuple of such tensors, and collate_fn must return "
            f"the same; got a {type(batch).__name__}"
        )
    return tuple(leaves)


def _in_groups(leaf: Tensor, draw: DrawnGroups) -> Tensor:
    """Return one tensor of a batch as `[groups, group_size, ...]`; zeros for groups that contribute nothing.

    In place of an empty draw one record was loaded, which is removed here.
    """
    groups = leaf[: draw.rows.size].reshape(*draw.rows.shape, *leaf.shape[1:])
    return zeros_where_incomplete(groups, torch.from_numpy(draw.complete))


def _synthetic_leaf(leaf: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return random inputs of the dtype of `leaf`; integers are only 0 and 1, which every vocabulary has."""
    shape = (*shape, *leaf.shape[2:])
    if leaf.is_floating_point():
        return (torch.rand(shape, generator=generator) * 2 - 1).to(leaf.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(leaf.dtype)
