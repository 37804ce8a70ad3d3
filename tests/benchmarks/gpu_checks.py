"""What must hold on a GPU as on a CPU. Each check returns what it measured, or says what fails.

They are the tests marked `gpu`; on a CPU they run as well, where some of them are weak. `benchmarks.gpu` runs
them on a machine that has no pytest.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.steps import CLIP_NORM, ImageTask, OurStep, PairTask, exact_clipped_sum
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.clipping.layers import GroupNormRule
from dpgcl_core.clipping.one_pass import as_layers_run
from dpgcl_core.clipping.types import no_sum, trainable_parameters
from dpgcl_core.noise.chacha20 import SecureGenerator, has_gpu_stream
from dpgcl_core.noise.chunked_draw import PART
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.workers import SingleWorker
from trainers.config.nodes import OptimizerConfig
from trainers.config.optimizer_registry import OPTIMIZERS
from trainers.config.training import TrainingConfig
from trainers.data.dataset import TrainingData
from trainers.files.checkpoint import CheckpointFolder
from trainers.models.clip.published_models import CLIP_TINY
from trainers.models.encoder import build_encoder
from trainers.training.callbacks import Checkpointing
from trainers.training.optimizers import build_optimizer, load_optimizer, take_step
from trainers.training.step import Training, prepare

Numbers = dict[str, float]
Check = Callable[[ImageTask], Numbers]

ERRORS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""The largest relative error of a clipped sum against one backward pass per group in the same precision."""
COMPANIONS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""How far what one group adds may change with the groups beside it: by the order of sums alone."""
_SAME_TRAINING = 1e-3
"""The largest relative distance of two trainings that differ in the order of sums alone."""
_NUM_STEPS, _NUM_DRAWS = 4, 3


class CheckError(Exception):
    """What was checked does not hold."""


def at_most(what: str, value: float, bound: float) -> float:
    """Return a value that is at most its bound; nan is not.

    Raises:
      CheckError: it is larger.
    """
    if not value <= bound:
        raise CheckError(f"{what} must be at most {bound:g}; it is {value:g}")
    return value


# Trainings in the seeded mode, which two devices take alike


def _seeded(task: ImageTask, *, prefetch: bool = False, at_once: int = 2) -> TrainingConfig:
    """Few steps of little noise, a few groups at once: what goes wrong in a sum is seen in the weights."""
    config = task.config(at_once * task.group_size * task.num_views)
    mechanism = dataclasses.replace(config.mechanism, num_steps=_NUM_STEPS, noise_multiplier=0.1)
    performance = dataclasses.replace(config.performance, prefetch=prefetch)
    optimizer = OptimizerConfig(name="sgd", learning_rate=1e-3)
    return dataclasses.replace(
        config, mechanism=mechanism, performance=performance, optimizer=optimizer, seeded_non_private=True
    )


def _prepared(config: TrainingConfig, task: ImageTask) -> Training:
    data = TrainingData(
        train=task.records(), index=None, queries=None, train_is_public=True, evaluation_is_public=True
    )
    return prepare(config, data, SingleWorker())


def _go_on(run: Training, num_steps: int) -> Training:
    for _ in range(num_steps):
        run.take_step()
    return run


def _moved(run: Training) -> Tensor:
    """How far a training has moved the weights, `[num_parameters]` on the CPU."""
    config = run.config
    start = build_encoder(config.network, run.data.train.images.shape[1:], config.public_seed)  # type: ignore[arg-type]
    return _flat(run.encoder) - _flat(start)


def _flat(network: nn.Module) -> Tensor:
    return torch.cat([each.detach().cpu().flatten().double() for each in trainable_parameters(network)])


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def views_made_in_a_thread(task: ImageTask) -> Numbers:
    """Views that a second thread makes are whole when they are used: the streams are in order."""
    plain, beside = (
        _moved(_go_on(_prepared(_seeded(task, prefetch=prefetch), task), _NUM_STEPS))
        for prefetch in (False, True)
    )
    return {"distance": at_most("the distance of both trainings", _distance(beside, plain), _SAME_TRAINING)}


def same_training_as_on_the_cpu(task: ImageTask) -> Numbers:
    """A seeded training ends where it does on the CPU, up to rounding."""
    expected = dataclasses.replace(task, device="cpu")
    ends = [_moved(_go_on(_prepared(_seeded(each), each), _NUM_STEPS)) for each in (task, expected)]
    return {"distance": at_most("the distance to the CPU's training", _distance(*ends), _SAME_TRAINING)}


def microbatches_change_nothing(task: ImageTask) -> Numbers:
    """All groups at once and two at a time are one and the same training."""
    ends = [
        _moved(_go_on(_prepared(_seeded(task, at_once=at_once), task), _NUM_STEPS)) for at_once in (1_000, 2)
    ]
    return {"distance": at_most("the distance of both trainings", _distance(*ends), _SAME_TRAINING)}


def resume_goes_on(task: ImageTask) -> Numbers:
    """A training that is stopped half way and goes on from its checkpoint ends as one that is not stopped."""
    config = _seeded(task)
    whole = _moved(_go_on(_prepared(config, task), _NUM_STEPS))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = CheckpointFolder(Path(folder) / "training", every_steps=_NUM_STEPS // 2)
        first = _prepared(config, task)
        Checkpointing(_go_on(first, _NUM_STEPS // 2), checkpoints).save()
        second = _prepared(config, task)
        Checkpointing(second, checkpoints).resume()
    resumed = _moved(_go_on(second, _NUM_STEPS - second.num_steps_done))
    return {"distance": at_most("the distance of both trainings", _distance(resumed, whole), _SAME_TRAINING)}


# Clipped sums


def clipped_sums_are_exact(task: ImageTask) -> Numbers:
    """In every precision the clipped sum is that of one pass per group, also where TF32 was allowed.

    Normalisations run as they do by themselves, lest a ReLU's input of zero but for rounding decide; they
    have a check of their own. The median of a few draws counts, see `OurStep.check`.
    """
    found = {}
    for precision, bound in ERRORS.items():
        clipped = _Clipped(dataclasses.replace(task, precision=precision))
        error = statistics.median(clipped.error_at(step) for step in range(_NUM_DRAWS))
        found[precision] = at_most(f"the error in {precision}", error, bound)
    return found


@contextmanager
def _tf32_allowed() -> Iterator[None]:
    """Set the process to compute float32 products in less, as a caller may have done."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def normalisations_are_torchs(task: ImageTask) -> Numbers:
    """A GroupNorm's output, input gradient and row sums are those of its own forward and backward pass."""
    found, generator = {}, torch.Generator().manual_seed(0)
    for shape in ((24, 64, 16, 16), (6, 24, 9, 9), (4, 128, 1, 1)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x, grad = (torch.randn(shape, generator=generator).to(task.device) for _ in range(2))
            layer = nn.GroupNorm(8, shape[1]).to(task.device)
            with torch.no_grad():
                for weights in layer.parameters():
                    weights.copy_(torch.randn(weights.shape, generator=generator))
            x = x.contiguous(memory_format=layout).requires_grad_()
            ends = _normalised_by_rule(layer, x, grad), _normalised_by_torch(layer, x, grad)
            errors = [_distance(a.cpu().double(), b.cpu().double()) for a, b in zip(*ends, strict=True)]
            name = f"{shape}, {'channels last' if layout is torch.channels_last else 'contiguous'}"
            found[name] = at_most(f"the error of {name}", max(errors), 1e-4)
    return found


def _normalised_by_rule(layer: nn.GroupNorm, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, gradient of the input, and those of scale and shift, of each row."""
    rule, num_rows = GroupNormRule(), len(x)
    ran = rule.runs(layer, x)
    assert ran is not None
    output, saved = ran
    per_row: list[Tensor] = []

    def arrived(gradient: Tensor) -> None:
        with torch.no_grad():
            vectors = rule.vectors(layer, x.detach(), gradient, num_rows, saved)
            per_row.extend(of_rows for _, of_rows in vectors)

    output.register_hook(arrived)
    (of_x,) = torch.autograd.grad(output, x, grad)
    return [output.detach(), of_x, *per_row]


def _normalised_by_torch(layer: nn.GroupNorm, x: Tensor, grad: Tensor) -> list[Tensor]:
    output = layer(x)
    of_x, *_ = torch.autograd.grad(output, x, grad)
    normal = nn.functional.group_norm(x.detach(), layer.num_groups, eps=layer.eps)
    return [output.detach(), of_x, (grad * normal).sum((2, 3)), grad.sum((2, 3))]


def contributions_keep_to_the_clip(task: ImageTask) -> Numbers:
    """In every precision no group adds more than C, by the norm of what it alone adds."""
    found = {}
    for precision in ERRORS:
        clipped = _Clipped(dataclasses.replace(task, precision=precision))
        views = clipped.views(0)
        longest = max(float(clipped.sum_of(views, place).norm()) for place in range(4))
        found[precision] = at_most(f"the longest contribution in {precision}", longest, CLIP_NORM)
    return found


def contributions_have_no_companions(task: ImageTask) -> Numbers:
    """What a group adds follows neither from the groups beside it nor from its place among them."""
    found = {}
    for precision, bound in COMPANIONS.items():
        clipped = _Clipped(dataclasses.replace(task, precision=precision))
        views, others = clipped.views(0), clipped.views(1)
        others[3] = views[0]
        distance = _distance(clipped.sum_of(others, 3), clipped.sum_of(views, 0))
        found[precision] = at_most(f"the change of a contribution in {precision}", distance, bound)
    return found


class _Clipped:
    """The clipped sums of a task, all of its groups in one pass."""

    def __init__(self, task: ImageTask) -> None:
        self._step = OurStep(task, task.expected_batch_size * task.num_views)
        self._groups = np.arange(task.expected_batch_size).reshape(-1, task.group_size)
        self._run, self._config = self._step.run, self._step.run.config
        self._objective = self._run.private_step.objective
        self._scale = self._config.network.gradient_scale

    def error_at(self, step: int) -> float:
        """Return how far the sum of a step is from that of one pass per group."""
        views = self.views(step)
        with _tf32_allowed(), as_layers_run():
            actual = self.sum_of(views)
        with full_precision(str(views.device.type)):
            return _distance(actual, self.sum_by_groups(views))

    def views(self, step: int) -> Tensor:
        """Return the views of all groups at a step."""
        made = self._step.inputs(self._groups, step)
        assert isinstance(made, Tensor)
        return made

    def error_of_replays(self) -> float:
        """Return how far a replay's sum is from that of the pass itself, both with the same groups masked."""
        run, total = self._run, self._run.private_step.total
        assert total is not None
        _require_replays(run)
        with torch.no_grad():
            for weights in trainable_parameters(run.encoder):
                weights.mul_(1.01)  # in place, as optimizers do
        views, complete = self.views(1), torch.arange(len(self._groups)) != 2
        views[1] = torch.inf
        ends = []
        for rule in (run.private_step.rule, self._config.rule(len(self._groups))):
            total.zero_()
            rule.add_clipped_sum(total, run.encoder, self._objective, views, complete=complete)
            ends.append(total.double().cpu().clone())
        return _distance(*ends)

    def sum_of(self, views: Tensor, place: int | None = None) -> Tensor:
        """Return the sum, or what the group at a place adds to it, float64 on the CPU."""
        rule, total = self._config.rule(), no_sum(self._run.encoder)
        assert isinstance(rule, GroupClipper)
        complete = None if place is None else torch.arange(len(views)) == place
        report = rule.add_clipped_sum(total, self._run.encoder, self._objective, views, complete)
        if "" in report.paths:  # its own comparison has failed, and it takes the exact way
            raise CheckError("one pass does not separate the groups here: the engine takes them one by one")
        return total.double().cpu()

    def sum_by_groups(self, views: Tensor) -> Tensor:
        """Return the sum by one backward pass per group, in the same precision."""
        bound = CLIP_NORM * self._scale
        total = exact_clipped_sum(self._run.encoder, self._objective, views, bound, together=True)
        return (total / self._scale).cpu()


def replays_are_the_passes(task: ImageTask) -> Numbers:
    """A captured pass adds what the pass does: of other inputs, weights and masks, with an infinite group."""
    if task.device != "cuda":
        return {}
    found = {}
    for precision, bound in COMPANIONS.items():
        error = _Clipped(dataclasses.replace(task, precision=precision)).error_of_replays()
        found[precision] = at_most(f"the change of a sum in {precision}", error, bound)
    return found


def passes_of_pairs_are_replayed(task: ImageTask) -> Numbers:
    """The step of CLIP on pairs of images and texts asks the GPU for no number, so its pass is captured."""
    pairs = PairTask(
        model=CLIP_TINY, group_size=4, expected_batch_size=32, threads=task.threads, device=task.device
    )
    step = OurStep(pairs, 32 * pairs.num_views)
    step.take()
    if task.device == "cuda":
        _require_replays(step.run)
    return {}


def _require_replays(run: Training) -> None:
    rule = run.private_step.rule
    if not isinstance(rule, GroupClipper) or rule.passes is None or not rule.passes.count:
        raise CheckError("the pass has not been captured")
    if torch.cuda.current_stream() != torch.cuda.default_stream():
        raise CheckError("the capture has left its stream behind")


# What comes after the sum


def optimizers_step_as_on_the_cpu(task: ImageTask) -> Numbers:
    """Fused optimizers take the CPU's steps, also from a state that was saved half way."""
    found = {}
    for name in OPTIMIZERS:
        ends = [_optimized(name, device, resumed=device != "cpu") for device in ("cpu", task.device)]
        found[name] = at_most(f"the distance of {name}", _distance(ends[1], ends[0]), 1e-5)
    return found


def _optimized(name: str, device: str, *, resumed: bool) -> Tensor:
    """Weights after steps along given gradients, one of them with the channels last in memory."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Conv2d(8, 16, 3).requires_grad_()
    gradients = [torch.randn(8 * 16 * 9 + 16, generator=generator) for _ in range(_NUM_STEPS)]
    with torch.no_grad():
        for weights in network.parameters():
            weights.copy_(torch.randn(weights.shape, generator=generator))
    network = network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = OptimizerConfig(name=name, weight_decay=0.01)
    optimizer = build_optimizer(config, network.parameters())
    for number, gradient in enumerate(gradients):
        if resumed and number == _NUM_STEPS // 2:
            state, optimizer = optimizer.state_dict(), build_optimizer(config, network.parameters())
            load_optimizer(optimizer, _on_the_cpu(state))
        take_step(optimizer, [*network.parameters()], gradient.to(device), learning_rate=0.01)
    return _flat(network)


def _on_the_cpu(state: dict[str, object]) -> dict[str, object]:
    """A state as a checkpoint gives it back."""
    with tempfile.TemporaryFile() as file:
        torch.save(state, file)
        file.seek(0)
        found: dict[str, object] = torch.load(file, weights_only=True, map_location="cpu")
        return found


def noise_is_added_as_on_the_cpu(task: ImageTask) -> Numbers:
    """The noisy sum is that of the CPU bit for bit, and its noise has the mechanism's deviation."""
    found, size = {}, 200_000
    clean = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    on_grid = GaussianNoise.on_grid(noise_multiplier=1.5, sensitivity=1.0, num_coordinates=size)
    normals = torch.from_numpy(np.random.default_rng(0).standard_normal(size))
    for law in (GaussianNoise(std=1.5), on_grid):
        noise = law._rounded(law.std * normals)
        here, there = clean.clone(), clean.to(task.device, copy=True)
        law.add_rounded_once(here, noise)
        law.add_rounded_once(there, noise.to(task.device))
        if not torch.equal(here, there.cpu()):
            raise CheckError(f"the noisy sum of {law} is another than the CPU's")
        ratio = float((there.cpu() - clean).std()) / law.std
        found[f"deviation over its own, grid {law.grid:g}"] = ratio
        at_most("the relative error of the deviation", abs(ratio - 1), 5 / (2 * size) ** 0.5)
    return found


def noise_of_the_device_is_normal(task: ImageTask) -> Numbers:
    """Noise that the device draws itself has the mechanism's law, and every seed its own."""
    found, size, law = {}, 400_000, GaussianNoise(std=1.5)
    seeds = (1, 2**62 + 1) if task.device == "cuda" else (1, 2)  # a CPU keeps the low 32 bits alone
    generators = [torch.Generator(task.device).manual_seed(seed) for seed in seeds]
    drawn = [law.draw(size, generator, task.device) / law.std for generator in generators]
    for number, noise in enumerate(drawn):
        for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
            deviation = math.sqrt(math.prod(range(1, 2 * power, 2)) / size)  # E z^2k is (2k − 1)!!
            distance = abs(float(noise.pow(power).mean()) - moment)
            name = f"moment {power} of seed {number}, in its deviations"
            found[name] = at_most(name, distance / deviation, 6)
    correlation = abs(float((drawn[0] * drawn[1]).mean())) * math.sqrt(size)
    found["correlation of seeds, in its deviations"] = at_most("the correlation of seeds", correlation, 6)
    return found


def stream_of_the_device_is_the_cpus(task: ImageTask) -> Numbers:
    """The device draws the cryptographic noise of the CPU bit for bit, and says how long a part takes."""
    if task.device != "cuda":
        return {}
    if not has_gpu_stream(torch.device(task.device)):
        raise CheckError("the device does not draw the cryptographic stream; the log has the reason")
    found = {}
    for size, scale in ((1, 1.0), (2**15 + 1, 2.0**31), (PART + 12345, 1.7 * 2.0**24)):
        here, there = (SecureGenerator(fixed_key_for_tests=bytes(range(32))) for _ in range(2))
        expected = torch.from_numpy(here.rounded_normal(size, scale))
        torch.cuda.synchronize()
        start = time.perf_counter()
        drawn = there.rounded_normal_on(task.device, size, scale)
        torch.cuda.synchronize()
        found[f"seconds of {size} draws at scale {scale:g}"] = time.perf_counter() - start
        if not torch.equal(drawn.cpu().view(torch.int64), expected.view(torch.int64)):
            raise CheckError(f"{size} draws at scale {scale:g} are others than the CPU's")
    return found


def random_state_is_left_alone(task: ImageTask) -> Numbers:
    """Neither a network's first weights nor a training draw from the device's global random state."""
    before = _random_state(task.device)
    _go_on(_prepared(_seeded(task), task), 1)
    if not torch.equal(before, _random_state(task.device)):
        raise CheckError("the device's random state has changed")
    return {}


def _random_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


CHECKS: dict[str, Check] = {
    check.__name__.replace("_", " "): check
    for check in (
        views_made_in_a_thread,
        same_training_as_on_the_cpu,
        microbatches_change_nothing,
        resume_goes_on,
        optimizers_step_as_on_the_cpu,
        clipped_sums_are_exact,
        normalisations_are_torchs,
        replays_are_the_passes,
        contributions_keep_to_the_clip,
        contributions_have_no_companions,
        noise_is_added_as_on_the_cpu,
        noise_of_the_device_is_normal,
        stream_of_the_device_is_the_cpus,
        random_state_is_left_alone,
    )
}
