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
- the weights are changed only by `step` and `load_state_dict`, and nothing else computed from the records is
  released. Exceptions of the data loader and whether a step fails are such outputs, and are not covered
  (docs/limits.md).

**Proposition.** For every sequence of calls and exceptions, at most `num_steps_taken` draws reach a pass,
each has at most one noise draw, and the optimizer applies a gradient of these draws only after it was
clipped and noised. *Proof.* A draw is counted before its records are read, and is handed out only then.
`step` removes the draw before the first pass, so no draw has two sums and no sum has two noise draws. Between
the draw's passes and the optimizer no call returns: an exception raised there, or by the data loader, ends
the training, clears all gradients, and every later draw and step is refused. At the update each parameter of
the optimizer has the noised gradient or none (`_check_gradients`), and no pass wrote a weight (`unwritten`).
A call that is refused before the first pass leaves the draw open: it has read only the program. ∎

*Several processes.* The proposition holds for a `torch.distributed` group of W processes with one draw and
one noise draw in total, and every process applies the same gradient. *Proof.* The first process counts the
draw, draws the groups and distributes them whole. The block of a draw ends with an exchange of failures
(`dpgcl_core.workers`), so no process passes a group of a draw that is not counted. `PrivateStep.take` sums
each coordinate at one process, adds its noise there, once, and shares the noisy sum. Each of these exchanges
begins, and the block ends, with an exchange of failures. So an exception in one process before the noisy sum
is shared reaches all processes before the update, which none applies. An exception in an update follows the
noise. It reaches the others at the end of the block. Either way the training has ended in all processes. They
began with the same weights and numbers (`check_agreement`), and with one group of processes (`_check_group`),
so they all take part in the same exchanges. The caller promises the same records in the same order, so that a
record is in one group of a draw; some records are compared, if they can be read twice alike. ∎

*Restarts.* With `folder` and R = `num_restart_steps` the first process also counts every draw durably, before
any process gets it. All attempts together make at most T + R draws (`dpgcl_core.attempts`), and ε is that of
T + R steps. A state holds weights, optimizer state and a number of steps: outputs of earlier draws. It holds
no generator, so a repeated step is a fresh draw, and no count, so loading it lowers none.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dpgcl_core.attempts import ChargedAttempt, changed_numbers
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
from dpgcl_core.workers import current_workers, failing_together

_NUM_PROBE_GROUPS, _PROBE_GROUP_SIZE = 3, 4
_NUM_COMPARED_RECORDS = 16  # random views are twice the same by chance for one record, but not for all
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")


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
    folder: str | Path | None = None,
    num_restart_steps: int | None = None,
) -> PrivateTraining:
    """Return a private training, which draws groups in secret, clips their gradients and adds noise.

    In a `torch.distributed` group of processes, every process makes the same call. The processes share the
    groups of each draw, and the clipped sum gets one noise draw.

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
      target_epsilon: ε after T steps, or T + R, for which the noise is calibrated. Set this or
        `noise_multiplier`.
      noise_multiplier: σ = noise std / sensitivity.
      target_delta: δ; 1/(N ln N) by default.
      num_records_public: N, the declared public number of records, the most that the data set may hold. By
        default N is the data set's own number of records. That number is then public, and neighbouring data
        sets differ in one record that is zeroed out.
      sampling: the sampled unit, "groups" (sensitivity C) or "records" (2C). The default is groups, or
        records for group_size "batch".
      clipping: "flat", the factor min(1, C/norm), or "automatic", the factor C/(norm + γ) with a constant γ.
      max_groups_at_once: the most groups in one forward and backward pass; by default, about as many as a
        step has. Their clipped gradients are accumulated, so it limits the memory of a step and does not
        change the sum. It has an effect only with `mixes_no_records`.
      mixes_no_records: your promise that model and loss, of whatever type, mix no records, keep every row of
        a batch in its place, and keep nothing of the records. Many groups then pass through the model at
        once, which is faster; otherwise one group at a time.
      folder: folder with the durable count of draws of a training that may be resumed. Set it together with
        `num_restart_steps`.
      num_restart_steps: R, the number of steps that restarts may repeat, all together. They are charged in
        advance: ε is that of T + R steps.

    Returns:
      The training; iterate over it, and call `step` on each batch of groups.

    Raises:
      ConfigError: the numbers contradict each other, a target ε cannot be met, the model or the loss mixes
        records, the optimizer holds parameters outside the model or needs a closure, the records are not
        tensors, the data loader has a custom sampler, a network is in a wrapper for several processes, only
        one of `folder` and `num_restart_steps` is set, or processes differ in model, data or numbers.
      ProcessFailed: another process has raised an error.
    """
    with failing_together(current_workers()):
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
            num_restart_steps=num_restart_steps,
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
        folder=folder,
    )


class PrivateTraining:
    """One private training; iterate over it and call `step` once for every batch of groups.

    Attributes:
      num_steps_taken: number of steps drawn, taken or not. A loaded state sets it to the state's number.
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
        folder: str | Path | None = None,
        randomness: DrawSource | None = None,
    ) -> None:
        """Check everything that can be checked before the first draw.

        Args:
          mechanism: a mechanism whose method clips the gradient of one loss per disjoint group.
          model, optimizer, data_loader, loss, max_groups_at_once, mixes_no_records, folder: as in
            `make_private`.
          randomness: source of secret draws; by default the cryptographic stream, with exact noise.

        Raises:
          ConfigError, ProcessFailed: as in `make_private`.
        """
        self._workers = current_workers()
        with failing_together(self._workers):
            method = mechanism.rules
            if not method.clips_groups:
                raise ConfigError(
                    f"{mechanism.method} does not clip one loss per disjoint group. Use `trainers.train`"
                )
            if mechanism.num_shards > 1:
                raise ConfigError(
                    "shards must be 1, because every process reads from the whole data set; got "
                    f"{mechanism.num_shards}. Use `trainers.train` for records in shards"
                )
            if (folder is None) != (mechanism.num_restart_steps is None):
                raise ConfigError(
                    "a training that may be resumed needs both folder, for the count of its draws, and "
                    f"num_restart_steps, which are charged in advance; got {folder} and "
                    f"{mechanism.num_restart_steps}. Set both, or neither"
                )
            if max_groups_at_once is not None:
                max_groups_at_once = whole_number("max_groups_at_once", max_groups_at_once)
                if max_groups_at_once < 1:
                    raise ConfigError(f"max_groups_at_once must be at least 1; got {max_groups_at_once}")
            self._records = _records_of(data_loader)
            _check_sampler(data_loader)
            method.check_records(mechanism, len(self._records))
            check_layers(model)
            _check_wrappers(model, *networks_of(loss))
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
                workers=self._workers,
                watch=lambda: unwritten(model, *networks_of(loss)),
            )
            self._open: DrawnGroups | None = None
            self._has_failed, self._lock = False, threading.RLock()  # one draw or step at a time
            self._state_digest: str | None = ""  # of the loaded state, until the first draw
            self._mixes_no_records, self._loss_verdicts = mixes_no_records, Verdicts[None]()
            self._attempt: ChargedAttempt | None = None
            if folder is not None and self._workers.rank == 0:
                self._attempt = ChargedAttempt(Path(folder), asdict(mechanism))
            _check_launch()
            self._check_loss([leaf[:, None] for leaf in self._collate.first])
            self._state = whole_state(model, modes=False)  # between steps the caller may change modes
            facts = self._facts() if self._workers.count > 1 else {}
        self._workers.check_agreement(facts)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that draws groups, adds noise and computes ε."""
        return self._private_step.mechanism

    def __iter__(self) -> Iterator[GroupInputs]:
        """Yield the inputs of each remaining step, drawn in secret: `[groups, group_size, views, ...]`.

        The inputs stay on the data loader's device; `step` moves them to the model's device. Each of several
        processes gets its share of the groups. A share may hold no group: its step must be taken, too, and
        a draw without any group adds only noise. If groups are sampled, a group that lacks a record consists
        of zeros and contributes nothing.

        Raises:
          ConfigError: the last draw was not followed by its step, the training has failed, a record's shape
            differs from the first record's, or the process group has changed.
          StorageError: restarts would repeat more than R steps, a newer attempt with this folder has begun,
            or the folder is damaged.
          ProcessFailed: another process has raised an error; no process draws again.
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
                self._check_running()
                with failing_together(self._workers):
                    self._check_drawable()
                if self._state_digest is not None:  # a process may have missed the state that others loaded
                    self._workers.check_agreement({"state": self._state_digest})
                    self._state_digest = None
                with self._ending_if_it_fails():
                    if self._attempt is not None:
                        self._attempt.count_draw(self.num_steps_taken)
                    self.num_steps_taken += 1
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
            errors are raised before any pass, so the call may be repeated, by all processes. The error that a
            pass changed the model ends the training.
          ProcessFailed: another process has raised an error, which ends the training here if it does there.
        """
        with self._lock:
            self._check_running()
            with failing_together(self._workers):
                groups, leaves = self._check_call(inputs)
            with self._ending_if_it_fails():
                self._open = None
                device = self._parameters[0].device
                self._private_step.take(
                    self.num_steps_taken - 1,
                    groups,
                    lambda rows: as_inputs([leaf[rows].to(device) for leaf in leaves]),
                    self._update,
                )

    def _check_call(self, inputs: GroupInputs) -> tuple[DrawnGroups, tuple[Tensor, ...]]:
        """Check a call of `step`; return the groups of the open draw and the tensors of their inputs."""
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
        return groups, leaves

    def _update(self, gradient: Tensor) -> None:
        self._check_gradients()
        set_gradients(self._parameters, gradient)
        self._optimizer.step()
        self._clear_gradients()

    def epsilon(self, num_steps: int | None = None) -> float:
        """Return ε at the mechanism's δ after the steps drawn so far, or after `num_steps` steps.

        If R = `num_restart_steps` is set, it is the ε of T + R steps, however many were drawn. Otherwise it
        is 0 before the first step. It is inf without noise. Source: privacy loss distributions (Koskela et
        al. 2020; Doroshenko et al. 2022).
        """
        steps = self._num_steps_charged if num_steps is None else whole_number("num_steps", num_steps)
        if steps < 0:
            raise ConfigError(f"num_steps must not be negative; got {steps}")
        if not steps:
            return 0.0
        return self.mechanism.epsilon(steps) if self.mechanism.is_private else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a later attempt loads: weights, buffers, optimizer state and steps taken.

        It is an output of the draws so far, with their ε. It holds no generator, so a repeated step draws
        afresh, and no count of draws, which is only in `folder`. As in PyTorch, the tensors are not copied.

        Raises:
          ConfigError: `folder` and `num_restart_steps` are not set, the last draw was not followed by its
            step, or the training has failed.
        """
        self._check_resumable()
        return {
            "mechanism": asdict(self.mechanism),
            "num_steps_taken": self.num_steps_taken,
            "model": {
                name: tensor.detach()
                for name, tensor in chain(self._model.named_parameters(), self._model.named_buffers())
            },
            "optimizer_class": f"{type(self._optimizer).__module__}.{type(self._optimizer).__qualname__}",
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of an earlier attempt with the same folder, before this attempt's first draw.

        Args:
          state: a result of `state_dict`; every process loads the same state.

        Raises:
          ConfigError: the state is of another mechanism, model or optimizer, steps were drawn before, as in
            `state_dict`, or processes load different states.
          ProcessFailed: another process has raised an error.
        """
        with failing_together(self._workers):
            own_state = self.state_dict()
            if self.num_steps_taken:
                raise ConfigError(
                    f"a state is loaded before the first draw; got {self.num_steps_taken} steps taken. Make "
                    "a new training with the same folder, and load the state there"
                )
            _check_state(state, own_state)
            num_steps_taken = whole_number("num_steps_taken", state["num_steps_taken"])
            if not 0 <= num_steps_taken <= self.mechanism.num_steps:
                raise ConfigError(
                    f"num_steps_taken must be in 0 to {self.mechanism.num_steps}; got {num_steps_taken}"
                )
            self._state_digest = _digest(dict(state))
        self._workers.check_agreement({"state": self._state_digest})
        with self._ending_if_it_fails(), torch.no_grad():
            try:
                self._optimizer.load_state_dict(state["optimizer"])
            except ValueError as error:
                raise ConfigError(f"the state is of another optimizer: {error}") from error
            for name, tensor in own_state["model"].items():
                tensor.copy_(state["model"][name])
            self.num_steps_taken, self._state = num_steps_taken, whole_state(self._model, modes=False)

    def statement(self) -> str:
        """Return the guarantee of the current weights in words, with the promises that it depends on."""
        numbers, promise = self.mechanism, "a group's loss depends only on the group's own records"
        if self._mixes_no_records:
            promise = f"each of network and loss {PROMISE}"
        if self._workers.count > 1:
            promise += "; every process has the same records in the same order"
        condition = numbers.rules.condition(numbers)
        restarts = "" if self._restart_steps is None else f" and {self._restart_steps} repeated steps"
        return (
            f"ε = {epsilon_text(self.epsilon())} at δ = {delta_text(numbers.target_delta)}, label "
            f"{numbers.guarantee_label}, of the weights after {self.num_steps_taken} of {numbers.num_steps} "
            f"steps{restarts}, to {numbers.neighboring_relation}{condition and f', for {condition}'}. The "
            f"author of the loop promises: {promise}; nothing else is released"
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
                with nullcontext() if self._workers.count == 1 else _NoExchange():  # type: ignore[no-untyped-call]
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

    @property
    def _restart_steps(self) -> int | None:
        return self.mechanism.num_restart_steps

    @property
    def _num_steps_charged(self) -> int:
        """The number of steps in ε: T + R, or the steps drawn so far if nothing is charged in advance."""
        return self.num_steps_taken if self._restart_steps is None else self.mechanism.num_steps_charged

    def _facts(self) -> dict[str, str]:
        """Return digests of everything in which the processes must agree, by name."""
        mechanism, step, loader = self.mechanism, self._private_step, self._loader
        facts = {
            "numbers": [asdict(mechanism), step.groups_at_once, self._mixes_no_records],
            "initial model": whole_state(self._model, modes=False, weights=True),
            "optimizer": [type(self._optimizer), self._optimizer.state_dict()],
            "records": [
                len(self._records),
                *((leaf.shape, leaf.dtype) for leaf in self._collate.first),
                *self._contents(),
            ],
            "number of loader workers": [loader.num_workers, loader.prefetch_factor],
        }
        return {name: _digest(value) for name, value in facts.items()}

    def _contents(self) -> list[str]:
        """Return digests of some records in their places; none if two readings differ, as of random views."""
        rows = range(0, len(self._records), math.ceil(len(self._records) / _NUM_COMPARED_RECORDS))
        first, second = ([_digest(self._collate([self._records[row]])) for row in rows] for _ in range(2))
        return first if first == second else []

    def _check_resumable(self) -> None:
        self._check_drawable()
        if self._restart_steps is None:
            raise ConfigError(
                "only a training with folder and num_restart_steps can be resumed, because repeated steps "
                "are charged in advance. Set both, or keep only the weights with model.state_dict()"
            )

    def _check_group(self) -> None:
        workers = current_workers()
        if (workers.rank, workers.count) != (self._workers.rank, self._workers.count):
            raise ConfigError(
                f"a training stays in the process group in which it began, of {self._workers.count}; got one "
                f"of {workers.count}. Call torch.distributed.init_process_group before make_private"
            )

    def _check_drawable(self) -> None:
        self._check_running()
        if self._open is not None:
            raise ConfigError(
                "every draw must be followed by exactly one step, even if it is empty. Call step once for "
                "each batch of groups"
            )

    def _check_running(self) -> None:
        """Raise ConfigError if the training has ended or changed its processes, which all processes know."""
        self._check_group()
        if self._has_failed:
            raise ConfigError(
                "this training has ended with an exception after records were drawn. The guarantee does not "
                f"cover drawing again. Its ε counts {self._num_steps_charged} steps. "
                + ("Start a new training, and add up both ε" if self._restart_steps is None else "Resume it")
            )

    @contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        try:
            with failing_together(self._workers):
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


class _NoExchange(TorchDispatchMode):
    """Refuses exchanges of the loss: its tests run alike in all processes and would not notice them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ConfigError(
                f"the loss may not exchange data between processes; it calls {func}. A group's loss depends "
                "only on its own inputs. Gather nothing from other processes; for more negatives, raise "
                "group_size"
            )
        return func(*args, **(kwargs or {}))


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


def _check_wrappers(*networks: nn.Module) -> None:
    """Raise ConfigError if a network is wrapped by a class that sums gradients before they are clipped."""
    for module in dict.fromkeys(module for network in networks for module in network.modules()):
        for name in {cls.__name__ for cls in type(module).__mro__}.intersection(_WRAPPERS):
            raise ConfigError(
                f"{name} sums or splits gradients before they are clipped. Pass the network inside it, whole "
                "in every process. make_private shares the groups, and sums their clipped gradients"
            )


def _check_state(state: Mapping[str, Any], own_state: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a state has the form of the training's own state."""
    if not isinstance(state, Mapping) or state.keys() != own_state.keys():
        raise ConfigError(
            f"a state must be a result of PrivateTraining.state_dict(), with {', '.join(own_state)}; got "
            "other keys"
        )
    if changed := changed_numbers(state["mechanism"], own_state["mechanism"]):
        raise ConfigError(f"the state is of another mechanism ({changed}). Load the state of this training")
    if (saved := state["optimizer_class"]) != own_state["optimizer_class"]:
        raise ConfigError(
            f"the state is of another optimizer, {saved}; got {own_state['optimizer_class']}. Load the "
            "state of this training"
        )
    then, now = ({n: (t.shape, t.dtype) for n, t in each["model"].items()} for each in (state, own_state))
    if names := [name for name in {**now, **then} if then.get(name) != now.get(name)]:
        raise ConfigError(
            f"the state is of another model; {names[0]!r} differs in name, shape or dtype. Load the state of "
            "this training"
        )


def _check_launch() -> None:
    """Raise ConfigError if torchrun has started several processes that do not know of each other."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if num_processes > 1 and current_workers().count == 1:
        raise ConfigError(
            f"torchrun has started {num_processes} processes, which would draw separately and cost more than "
            "the stated ε. Call torch.distributed.init_process_group before make_private"
        )


def _digest(value: Any) -> str:
    """Return a digest of a value; of a tensor's numbers, and of the parts of dictionaries and lists."""
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return _digest([value.shape, value.dtype, hashlib.sha256(numbers.data).hexdigest()])
    if isinstance(value, dict):
        value = [(name, _digest(part)) for name, part in value.items()]
    elif isinstance(value, list | tuple):
        value = [_digest(part) for part in value]
    return hashlib.sha256(repr(value).encode()).hexdigest()


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
