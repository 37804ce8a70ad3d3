"""Secret randomness from a cryptographic stream: ChaCha20 under a fresh key for every step and purpose.

Threat model. A reader of the released weights sees functions of sampling, permutation and noise. A
statistical generator such as PCG64 gives no assurance that its state cannot be inferred from them.
Distinguishing ChaCha20's output from uniform bits is believed to be computationally infeasible. Each
generator has its own 256-bit key from the operating system, so one step's stream reveals nothing about
another's, a repeated step is an independent draw, and nothing is stored, shared or replayed. Formally the
guarantee then holds against computationally bounded adversaries, with the same ε and δ. Not protected are
the memory of machine and GPU (Python cannot wipe a key) and timing, which depends on the draws, not on the
data.

numpy's own `Generator` can take its bits from Python only through a callback per number. `SecureGenerator`
therefore has only the methods that sampling, grouping and noise use, vectorised: a call of any other method
raises instead of using a weaker source.

Finite words do not change any distribution noticeably (docs/theory/noise.md):

- `random` returns the upper 53 bits as a multiple of 2^-53: u < q has a probability in [q, q + 2^-53).
- `permutation` sorts independent 64-bit keys, and draws all of them again if two are equal: every order is
  exactly equally likely.
- `rounded_normal` returns normals rounded to whole numbers with exactly the right probabilities
  (`dpgcl_core.noise.rounded_normal`). A GPU draws the same numbers (`dpgcl_core.noise.gpu_stream`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.randomness import DrawSource, SecretRandomness, SeededNonPrivateRandomness
from dpgcl_core.noise.rounded_normal import LARGEST_SCALE, PAIRS_AT_ONCE, Words, rounded_normals

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_KEY_BYTES = 32
_FROM_ZERO = bytes(16)
"""Block counter, 4 bytes, and nonce, 12 bytes, of the stream. Additional bits have other nonces."""

_MAX_WORDS = 2**35
"""256 GiB. After 2^32 blocks of 64 bytes the counter of RFC 8439 wraps around, and the stream repeats."""

_ZEROS = memoryview(bytes(16 * PAIRS_AT_ONCE))


class SecureGenerator:
    """Uniform numbers, permutations and normals from one ChaCha20 stream; not to be shared by threads.

    Closures hold the key, for additional bits and for a draw on a GPU. `repr` does not show it, and the
    generator can be neither copied nor pickled.

    Args:
      fixed_key_for_tests: a key of 32 bytes instead of the operating system's. Anyone who knows it can
        compute all draws: **for tests only**.

    Raises:
      ConfigError: the fixed key does not have 32 bytes.

    >>> a, b = (SecureGenerator().random(1) for _ in range(2))
    >>> bool(a == b)
    False
    >>> a, b = (SecureGenerator(fixed_key_for_tests=bytes(32)).standard_normal(3) for _ in range(2))
    >>> bool((a == b).all())
    True
    """

    def __init__(self, *, fixed_key_for_tests: bytes | None = None) -> None:
        key = secrets.token_bytes(_KEY_BYTES) if fixed_key_for_tests is None else fixed_key_for_tests
        if len(key) != _KEY_BYTES:
            raise ConfigError(f"a key must have {_KEY_BYTES} bytes; got {len(key)}")
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # not needed for public data

        def keystream(nonce: bytes) -> Any:
            return Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()

        def additional_bytes(start: int, pair: int, num_bytes: int) -> bytes:
            """Return the first bytes of the stream whose nonce has a 1 and the place of the pair's u."""
            nonce = bytes(4) + (1).to_bytes(4, "little") + (start + pair).to_bytes(8, "little")
            return bytes(keystream(nonce).update(bytes(num_bytes)))

        def key_on(device: torch.device | str) -> torch.Tensor:
            """Return the key in a new buffer on a device, int32 `[8]`."""
            import torch

            return torch.frombuffer(bytearray(key), dtype=torch.int32).to(device)

        self._stream, self._additional_bytes, self._key_on = keystream(_FROM_ZERO), additional_bytes, key_on
        self._num_words_left = _MAX_WORDS

    def __repr__(self) -> str:
        return "SecureGenerator(ChaCha20, key not shown)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecureGenerator cannot be copied or pickled: a copy would repeat its draws")

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Return independent uniform multiples of 2^-53 in [0, 1), `[size]`."""
        return _upper_bits(self._words(size), 53)

    def permutation(self, x: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the entries of `x`, `[length]`, in exactly uniformly random order."""
        while True:
            keys = self._words(len(x))
            order = np.argsort(keys)
            ordered = keys[order]
            if not np.any(ordered[1:] == ordered[:-1]):
                return x[order]

    def integers(self, low: int, high: int, size: int, /) -> NDArray[np.int64]:
        """Return independent, exactly uniform integers in [low, high), `[size]`."""
        count = high - low
        if count < 1:
            raise ConfigError(f"high must be above low; got {low} and {high}")
        fair = 2**64 - 2**64 % count  # words from `fair` on would favour the lower numbers
        uniform = np.empty(0, dtype=np.uint64)
        while len(uniform) < size:
            words = self._words(size - len(uniform))
            uniform = np.concatenate([uniform, words if fair == 2**64 else words[words < np.uint64(fair)]])
        return (uniform % np.uint64(count)).astype(np.int64) + low

    def standard_normal(self, size: int, /) -> NDArray[np.float64]:
        """Return independent draws from N(0, 1), `[size]`, rounded exactly to multiples of 2^-24."""
        return self.rounded_normal(size, 2.0**24) * 2.0**-24

    def rounded_normal(self, size: int, scale: float, /) -> NDArray[np.float64]:
        """Return independent draws from N(0, scale²), each rounded to the nearest integer, `[size]`.

        Guarantee: if the stream's words are uniform, each integer has exactly the probability that it has for
        real numbers (`dpgcl_core.noise.rounded_normal`). The i-th draw is a function of the key, of `scale`
        and of the place in the stream, whatever `size` is.

        Raises:
          ConfigError: `scale` is not between 2^-40 and 2^40.
        """
        _check_scale(scale)
        multiples = np.empty(size)
        for start in range(0, size, 2 * PAIRS_AT_ONCE):
            additional_bytes = partial(self._additional_bytes, _MAX_WORDS - self._num_words_left)
            words = self._words(2 * PAIRS_AT_ONCE)
            rounded_normals(multiples[start : start + 2 * PAIRS_AT_ONCE], words, scale, additional_bytes)
        return multiples

    def rounded_normal_on(self, device: torch.device | str, size: int, scale: float, /) -> torch.Tensor:
        """Return the draws of `rounded_normal`, bit for bit, computed on a GPU that `has_gpu_stream`.

        The generator draws nothing else: its key goes to the device for this draw alone.

        Raises:
          ConfigError: `scale` is not between 2^-20 and 2^40, the generator has drawn before, the stream is
            too short, or a CUDA graph is being captured.
        """
        import torch

        _check_scale(scale)
        if self._num_words_left < _MAX_WORDS or size > _MAX_WORDS:
            raise ConfigError(
                f"a GPU draws at most {_MAX_WORDS} normals, from a generator that has drawn nothing; got "
                f"{size} after {_MAX_WORDS - self._num_words_left} words. Use a new generator for every draw"
            )
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "noise must not be drawn while a CUDA graph is captured, because each replay would repeat "
                f"it; got a draw of {size} normals. Take private steps outside CUDA graphs"
            )
        from dpgcl_core.noise import gpu_stream  # imported here, because only a GPU's torch brings Triton

        try:
            additional_bytes = partial(self._additional_bytes, 0)
            multiples = gpu_stream.rounded_multiples(self._key_on(device), size, scale, additional_bytes)
            if multiples is None:
                multiples = torch.from_numpy(self.rounded_normal(size, scale)).to(device)
        finally:
            self._num_words_left = 0
        return multiples

    def _words(self, count: int) -> Words:
        """Return the next `count` words of 64 bits of the stream, little-endian."""
        if count > self._num_words_left:
            raise ConfigError(
                f"one generator returns at most {_MAX_WORDS} words of 64 bits before its stream repeats; got "
                f"{count} with {self._num_words_left} left. Use a new generator for every draw"
            )
        self._num_words_left -= count
        words = np.empty(count, dtype="<u8")
        output_bytes = words.view(np.uint8).data
        for start in range(0, len(output_bytes), len(_ZEROS)):
            part = output_bytes[start : start + len(_ZEROS)]
            self._stream.update_into(_ZEROS[: len(part)], part)
        return words


def _check_scale(scale: float) -> None:
    if not 1 / LARGEST_SCALE <= scale <= LARGEST_SCALE:
        raise ConfigError(f"scale must be between 2^-40 and 2^40; got {scale}")


@cache
def has_gpu_stream(device: torch.device) -> bool:
    """Return whether a GPU draws what the CPU draws from a known key; if not, log the reason, once."""
    on_gpu, on_cpu = (SecureGenerator(fixed_key_for_tests=bytes(range(32))) for _ in range(2))
    size, scale = 2 * PAIRS_AT_ONCE + 1, 2.0**31  # float64 cannot decide about 30 of these draws
    try:
        multiples = on_gpu.rounded_normal_on(device, size, scale).cpu().numpy()
    except ConfigError:
        raise  # a CUDA graph is being captured
    except Exception as problem:  # Triton is not installed, or its compiler fails
        reason = f"{type(problem).__name__}: {problem}"
    else:
        if multiples.tobytes() == on_cpu.rounded_normal(size, scale).tobytes():
            return True
        reason = "its draws differ from the CPU's"
    logger.warning("drawing the noise of private data on the CPU, not on %s: %s", device, reason)
    return False


def _upper_bits(words: Words, num_bits: int) -> NDArray[np.float64]:
    """Return the words' upper `num_bits` ≤ 63 bits times 2^-num_bits, in [0, 1]; overwrites `words`."""
    words >>= np.uint64(64 - num_bits)
    # Signed numbers become floats several times as fast as unsigned ones.
    floats = words.view("<i8").astype(np.float64)
    floats *= 2.0**-num_bits
    return floats


class SecureRandomness:
    """A source whose every call returns a `SecureGenerator` with a fresh key; its arguments have no effect.

    Its noise is drawn exactly on a grid (`GaussianNoise.on_grid`).

    >>> source = SecureRandomness()
    >>> a, b = source.generator(0, "noise"), source.generator(0, "noise")
    >>> bool(a.random(1) == b.random(1))
    False
    """

    is_exact = True
    description = "cryptographic stream (ChaCha20), noise drawn exactly on a public grid"

    def generator(self, step: int, purpose: str) -> SecureGenerator:
        return SecureGenerator()

    def gpu_generators(self, device: torch.device) -> Callable[[str], SecureGenerator] | None:
        return partial(self.generator, 0) if has_gpu_stream(device) else None


def choose_randomness(
    *, secure_noise: bool | None, data_are_private: bool, public_seed: int | None = None
) -> DrawSource:
    """Return a training's source of randomness: for private data always the cryptographic stream.

    Args:
      secure_noise: whether to use the stream; None for the default: only for private data.
      data_are_private: whether the records are private.
      public_seed: the seed of a seeded run, which has no guarantee; None for all other runs.

    Raises:
      ConfigError: private data are used without the stream, or a seeded run is used with it.

    >>> choose_randomness(secure_noise=None, data_are_private=True).is_exact
    True
    """
    if data_are_private and (secure_noise is False or public_seed is not None):
        raise ConfigError(
            "private records must be sampled and noised from the cryptographic stream only; got "
            f"secure_noise = {secure_noise} and {'no' if public_seed is None else 'a'} seed. Leave out "
            "secure_noise and the seeded mode, or declare the data public"
        )
    if public_seed is not None:
        if secure_noise:
            raise ConfigError(
                "a seeded run repeats its draws, but a cryptographic stream never does; got secure_noise = "
                "True and a seed. Leave out one of them"
            )
        return SeededNonPrivateRandomness(public_seed)
    secure = data_are_private if secure_noise is None else secure_noise
    return SecureRandomness() if secure else SecretRandomness()
