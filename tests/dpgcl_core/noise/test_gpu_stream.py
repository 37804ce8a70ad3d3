"""The stream on a GPU draws the CPU's numbers bit for bit; here in Triton's interpreter.

Triton decides at its import whether it interprets, so that is done in a process of its own.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise import chacha20, chunked_draw, rounded_normal
from dpgcl_core.noise.chacha20 import SecureGenerator, SecureRandomness, has_gpu_stream
from dpgcl_core.noise.chunked_draw import add_in_parts, part_noise, parts_of
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.rounded_normal import PAIRS_AT_ONCE
from tests.dpgcl_core.noise.test_randomness import RFC_8439_KEYSTREAMS

KEY = bytes(range(32))
PIECE = 2 * PAIRS_AT_ONCE
HALF = PAIRS_AT_ONCE // 8
Run = Callable[..., Any]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from dpgcl_core.noise import gpu_stream

    gpu_stream._BLOCKS = HALF  # a program takes as long for many blocks as for a few


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Calls a function of this module in the process where Triton interprets."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def _key_on(device: str = "cpu") -> torch.Tensor:
    return SecureGenerator(fixed_key_for_tests=KEY)._key_on(device)


def _drawn(size: int, scale: float, blocks: int = HALF) -> NDArray[np.float64]:
    """In the interpreter's process: the draw of a device."""
    from dpgcl_core.noise import gpu_stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_stream, "_BLOCKS", blocks)
        generator = SecureGenerator(fixed_key_for_tests=KEY)
        on_device: NDArray[np.float64] = generator.rounded_normal_on("cpu", size, scale).numpy()
    return on_device


def _listed_words(
    key: bytes, programs: tuple[int, int], blocks: int, half: int, size: int
) -> NDArray[np.int64]:
    """In the interpreter's process: place, upper bits of u and angle word of all draws, in order."""
    from dpgcl_core.noise import gpu_stream

    undecided = torch.zeros(size + 1, 3, dtype=torch.int64)
    numbers = torch.tensor([1.0, math.pi * 2.0**-63, -1.0, 0.0, 1.0], dtype=torch.float64)  # none is decided
    key_buffer, multiples = SecureGenerator(fixed_key_for_tests=key)._key_on("cpu"), torch.empty(size)
    gpu_stream._draw[programs](
        key_buffer, numbers, multiples.double(), undecided, size, size, blocks=blocks, half=half
    )
    assert int(undecided[0, 0]) == size
    rows: NDArray[np.int64] = undecided[1:].numpy()
    return rows[rows[:, 0].argsort()]


def _keystream(key: bytes, first_block: int, num_words: int) -> NDArray[np.uint64]:
    cipher = Cipher(algorithms.ChaCha20(key, first_block.to_bytes(4, "little") + bytes(12)), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(8 * num_words)), dtype="<u8")


@needs_triton
@pytest.mark.parametrize(("key", "counter"), [(0, 0), (0, 1), (1, 1)])
def test_words_of_a_device_are_those_of_rfc_8439(key: int, counter: int, run: Run) -> None:
    rows = run(_listed_words, key.to_bytes(32, "big"), (1, 1), 2, HALF, 16)
    expected = np.frombuffer(bytes.fromhex(RFC_8439_KEYSTREAMS[key, counter]), dtype="<u8")
    assert np.array_equal(rows[8 * counter : 8 * counter + 8, 1], expected >> np.uint64(1))


@needs_triton
def test_words_of_a_device_are_those_of_the_stream(run: Run) -> None:
    """Of two pieces, each in two programs: all edges between programs and pieces are there."""
    rows = run(_listed_words, KEY, (2, 2), HALF // 2, HALF, 2 * PIECE)
    words = _keystream(KEY, 0, 2 * PIECE).reshape(2, 2, PAIRS_AT_ONCE)
    both = np.repeat(words[:, None], 2, axis=1)  # cosine and sine of a pair have the same words
    assert np.array_equal(rows[:, 0], np.arange(2 * PIECE))
    assert np.array_equal(rows[:, 1], (both[:, :, 0] >> np.uint64(1)).ravel())
    assert np.array_equal(rows[:, 2].view("<u8"), both[:, :, 1].ravel())


@needs_triton
def test_words_of_a_device_go_to_the_end_of_the_stream(run: Run) -> None:
    """The angles of this layout are the last blocks that the counter of 32 bits has."""
    rows = run(_listed_words, KEY, (1, 1), 4, 2**32 - 4, 32)
    assert np.array_equal(rows[:, 2].view("<u8"), _keystream(KEY, 2**32 - 4, 32))


@needs_triton
@pytest.mark.parametrize(
    "size", [1, PAIRS_AT_ONCE - 1, PAIRS_AT_ONCE + 1, PIECE - 1, PIECE + 1, 2 * PIECE + 9]
)
def test_draw_of_a_device_is_the_cpus(size: int, run: Run) -> None:
    expected = SecureGenerator(fixed_key_for_tests=KEY).rounded_normal(size, 1.7 * 2.0**24)
    assert run(_drawn, size, 1.7 * 2.0**24).tobytes() == expected.tobytes()


@needs_triton
@pytest.mark.parametrize(("scale", "blocks"), [(0.1, HALF), (2.0**31, HALF // 2), (2.0**40, HALF)])
def test_draw_of_a_device_is_the_cpus_at_every_scale_and_block_size(
    scale: float, blocks: int, run: Run
) -> None:
    """At 0.1 most draws are zero, at 2^31 a few dozen are undecided, at 2^40 more than there is room for."""
    expected = SecureGenerator(fixed_key_for_tests=KEY).rounded_normal(PIECE, scale)
    drawn = run(_drawn, PIECE, scale, blocks)
    assert drawn.tobytes() == expected.tobytes()
    assert not np.signbit(drawn[drawn == 0]).any()


def _decided_exactly(on_device: bool, size: int, scale: float) -> set[tuple[Any, ...]]:
    """In the interpreter's process: words, axis and additional bytes of the undecided draws."""
    from dpgcl_core.noise import gpu_stream

    seen = set[tuple[Any, ...]]()
    own = rounded_normal.nearest_integer

    def spy(
        upper_bits: int, angle: int, scale: float, is_sine: int, pair: int, additional: Callable[..., bytes]
    ) -> int:
        seen.add((upper_bits, angle, is_sine, additional(pair, 64)))
        return own(upper_bits, angle, scale, is_sine, pair, additional)

    with pytest.MonkeyPatch.context() as patch:
        for module in (gpu_stream, rounded_normal):
            patch.setattr(module, "nearest_integer", spy)
        generator = SecureGenerator(fixed_key_for_tests=KEY)
        if on_device:
            generator.rounded_normal_on("cpu", size, scale)
        else:
            generator.rounded_normal(size, scale)
    return seen


@needs_triton
def test_undecided_draws_of_a_device_have_the_cpus_additional_bits(run: Run) -> None:
    on_device, on_cpu = (run(_decided_exactly, place, PIECE + 999, 2.0**31) for place in (True, False))
    assert len(on_device) > 20
    assert {is_sine for _, _, is_sine, _ in on_device} == {0, 1}
    assert on_device == on_cpu


def _keys_after_draws() -> list[int]:
    """In the interpreter's process: sums of the key's buffers after a draw and after one that fails."""
    from dpgcl_core.noise import gpu_stream

    keys = [_key_on(), _key_on()]
    assert keys[0].numpy().tobytes() == KEY
    with pytest.MonkeyPatch.context() as patch:
        gpu_stream.rounded_multiples(keys[0], 1, 1.0, lambda *_: b"")
        patch.setattr(gpu_stream, "_draw", None)
        with pytest.raises(TypeError):
            gpu_stream.rounded_multiples(keys[1], 1, 1.0, lambda *_: b"")
    return [int(key.abs().sum()) for key in keys]


@needs_triton
def test_key_of_a_device_is_overwritten_after_the_draw(run: Run) -> None:
    assert run(_keys_after_draws) == [0, 0]


def _draw_twice(then: str) -> str:
    """In the interpreter's process: the message of a second draw after a device's."""
    generator = SecureGenerator(fixed_key_for_tests=KEY)
    generator.rounded_normal_on("cpu", 1, 1.0)
    with pytest.raises(ConfigError) as refused:
        generator.rounded_normal_on("cpu", 1, 1.0) if then == "device" else generator.random(1)
    return str(refused.value)


@needs_triton
@pytest.mark.parametrize("then", ["device", "cpu"])
def test_generator_draws_nothing_after_a_devices_draw(then: str, run: Run) -> None:
    assert "Use a new generator for every draw" in run(_draw_twice, then)


def test_generator_that_has_drawn_gives_no_device_its_key() -> None:
    generator = SecureGenerator(fixed_key_for_tests=KEY)
    generator.random(3)
    with pytest.raises(ConfigError, match=r"got 1 after 3 words\. Use a new generator for every draw"):
        generator.rounded_normal_on("cpu", 1, 1.0)


def test_device_does_not_draw_beyond_the_stream() -> None:
    with pytest.raises(ConfigError, match=f"at most {2**35} normals.*got {2**35 + 1}"):
        SecureGenerator().rounded_normal_on("cpu", 2**35 + 1, 1.0)


@pytest.mark.parametrize("scale", [0.0, 2.0**41, math.nan])
def test_scale_that_float64_cannot_serve_is_refused_on_a_device(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale must be between"):
        SecureGenerator().rounded_normal_on("cpu", 1, scale)


@pytest.fixture
def untried() -> Iterator[None]:
    """Forgets, before and after, which devices have the stream."""
    has_gpu_stream.cache_clear()
    yield
    has_gpu_stream.cache_clear()


@pytest.mark.usefixtures("untried")
def test_noise_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first trial of the device nor a later draw takes it for a device without the stream."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for draw in (
        lambda: SecureGenerator().rounded_normal_on("cpu", 1, 1.0),
        lambda: SecureRandomness().gpu_generators(torch.device("cpu")),
    ):
        with pytest.raises(ConfigError, match="each replay would repeat it"):
            draw()


@pytest.mark.usefixtures("untried")
def test_without_triton_the_cpu_draws_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "dpgcl_core.noise.gpu_stream", raising=False)
    monkeypatch.delattr("dpgcl_core.noise.gpu_stream", raising=False)
    for _ in range(2):
        assert SecureRandomness().gpu_generators(torch.device("cpu")) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "on the CPU, not on cpu: ModuleNotFoundError" in record.getMessage()


def _tried(first_draw: float) -> bool:
    """In the interpreter's process: whether a device counts as having the stream if a draw is moved."""
    from dpgcl_core.noise import gpu_stream

    own = gpu_stream.rounded_multiples

    def moved(*args: Any) -> torch.Tensor:
        multiples: torch.Tensor = own(*args)
        multiples[0] += first_draw
        return multiples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_stream, "rounded_multiples", moved)
        return has_gpu_stream.__wrapped__(torch.device("cpu"))


@needs_triton
@pytest.mark.parametrize(("first_draw", "expected"), [(0.0, True), (1.0, False)])
def test_device_whose_draws_differ_is_not_used(first_draw: float, expected: bool, run: Run) -> None:
    assert run(_tried, first_draw) is expected


def _noisy_sums() -> list[NDArray[np.float64]]:
    """In the interpreter's process: a sum with noise in parts, from a device and from the CPU."""
    law = GaussianNoise.on_grid(noise_multiplier=2.0, sensitivity=1.0, num_coordinates=1500)
    sums = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_draw, "PART", 1000)
        for gpu in ("cpu", None):
            keys = iter(range(1, 10))
            patch.setattr(chacha20.secrets, "token_bytes", lambda n, keys=keys: bytes([next(keys)]) * n)
            generator_of = SecureRandomness().gpu_generators(torch.device("cpu"))
            assert generator_of is not None
            total = torch.linspace(-1, 1, 1500, dtype=torch.float64)
            add_in_parts(total, law, part_noise(law, generator_of, gpu), parts_of(len(total)))
            sums.append(total.numpy())
            assert next(keys) == 3, "each part has its own key"
    return sums


@needs_triton
def test_noisy_sum_of_a_device_is_the_cpus(run: Run) -> None:
    on_device, on_cpu = run(_noisy_sums)
    assert on_device.tobytes() == on_cpu.tobytes()
    assert abs(on_device.std() / 2.0 - 1) < 0.2


def _compiled() -> str:
    """In a process where Triton compiles: the kernel's assembly for an H100."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpgcl_core.noise import gpu_stream

    types = ["*i32", "*fp64", "*fp64", "*i64", "i32", "i32", "constexpr", "constexpr"]
    signature = dict(zip(gpu_stream._draw.arg_names, types, strict=True))
    constants = {"blocks": gpu_stream._BLOCKS, "half": gpu_stream._HALF}
    source = ASTSource(fn=gpu_stream._draw, signature=signature, constexprs=constants)
    kernel = compile(source, target=GPUTarget("cuda", 90, 32))
    assert kernel.asm["cubin"]
    return str(kernel.asm["ptx"])


@pytest.mark.ci
@needs_triton
def test_kernel_is_compiled_for_a_gpu_without_narrower_numbers() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assembly = pool.submit(_compiled).result()
    assert ".f64" in assembly
    assert ".f32" not in assembly
    assert "sqrt.rn.f64" in assembly
    assert "sqrt.approx" not in assembly
