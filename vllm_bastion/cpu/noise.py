# SPDX-License-Identifier: Apache-2.0
"""vLLM's Gumbel-max draw, on the host.

``vllm.v1.worker.gpu.sample.gumbel`` hashes (request seed, position, token) with MurmurHash3 to get
the noise of a draw. This is the same function, bit for bit. The hash is compiled. The logarithms
are NumPy's, as in Triton's interpreter: another library's may differ in the last bit.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from bastion_kernels.cpu.cache import njit

_U32 = np.uint32
# Makes a drafter's noise independent of the target's; vLLM's `_DRAFT_NOISE_SALT`.
DRAFT_SALT = 1 << 30
_FP64_DOMAIN = 0x9E3779B9  # of the second hash of an fp64 draw


@njit
def _mix(h, key):  # type: ignore[no-untyped-def]
    key = _U32(key * _U32(0xCC9E2D51))
    key = _U32((key << _U32(15)) | (key >> _U32(17)))
    h = _U32(h ^ _U32(key * _U32(0x1B873593)))
    h = _U32((h << _U32(13)) | (h >> _U32(19)))
    return _U32(_U32(h * _U32(5)) + _U32(0xE6546B64))


@njit
def _murmur3(seed, pos, domain, tokens, out):  # type: ignore[no-untyped-def]
    """Hash tokens [K] for a seed and a position into out [K] uint32."""
    low = np.int64(0xFFFFFFFF)
    prefix = _mix(_U32(domain), _U32(seed & low))
    prefix = _mix(prefix, _U32((seed >> np.int64(32)) & low))
    prefix = _mix(prefix, _U32(pos & low))
    for i in range(out.shape[0]):
        h = _U32(_mix(prefix, _U32(tokens[i])) ^ _U32(16))
        h = _U32(_U32(h ^ (h >> _U32(16))) * _U32(0x85EBCA6B))
        h = _U32(_U32(h ^ (h >> _U32(13))) * _U32(0xC2B2AE35))
        out[i] = _U32(h ^ (h >> _U32(16)))


@njit
def _uniform(random, out):  # type: ignore[no-untyped-def]
    """Map hashes [V] uint32 to [V] fp32 in (0, 1); rounding may give 0 or 1."""
    for i in range(out.shape[0]):
        high, low = np.float32(random[i] >> _U32(16)), np.float32(random[i] & _U32(0xFFFF))
        out[i] = high * np.float32(1.52587890625e-05) + (low + np.float32(0.5)) * np.float32(
            2.3283064365386963e-10
        )


@njit
def _near_zero(value, log):  # type: ignore[no-untyped-def]
    """Overwrite log [V] with log(1 - value) where value < 1/4, by the series that vLLM uses."""
    one = np.float32(1.0)
    for i in range(value.shape[0]):
        x = value[i]
        if x < np.float32(0.25):
            p = np.float32(1.0 / 8.0)
            for order in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0):
                p = np.float32(one / np.float32(order)) + x * p
            log[i] = -x * (one + x * p)


def _hash(seed: int, pos: int, tokens: np.ndarray, domain: int = 0) -> np.ndarray:
    out = np.empty(len(tokens), dtype=_U32)
    _murmur3(np.int64(seed), np.int64(pos), _U32(domain), tokens, out)
    return out


def _noise(random: np.ndarray) -> np.ndarray:
    """Map hashes [V] uint32 to noise [V] fp32."""
    uniform = np.empty(len(random), dtype=np.float32)
    _uniform(random, uniform)
    log = np.log(np.maximum(np.float32(1.0) - uniform, np.float32(5.960464477539063e-08)))
    _near_zero(uniform, log)
    noise: np.ndarray = -np.log(-log)
    return noise


def gumbel_at(seed: int, pos: int, tokens: np.ndarray, *, fp64: bool = False) -> np.ndarray:
    """The noise of the given tokens [K] int64 in a draw, [K] fp32; in vLLM's fp64 mode, fp64."""
    hashed = _hash(seed, pos, tokens)
    if fp64:
        return _noise_fp64(hashed, _hash(seed, pos, tokens, _FP64_DOMAIN))
    return _noise(hashed)


def gumbel_row(seed: int, pos: int, vocab_size: int, *, fp64: bool = False) -> np.ndarray:
    """The noise of all tokens in a draw, [V]; see `gumbel_at`."""
    return gumbel_at(seed, pos, _vocabulary(vocab_size), fp64=fp64)


@lru_cache(4)
def _vocabulary(size: int) -> np.ndarray:
    return np.arange(size)


def _noise_fp64(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Map two hashes of each token, [V] uint32, to noise [V] fp64."""
    random53 = ((high.astype(np.uint64) << np.uint64(32)) | low) >> np.uint64(11)
    uniform = (random53.astype(np.float64) + 0.5) * 1.1102230246251565e-16
    uniform[uniform == 1.0] -= 1.1102230246251565e-16
    noise: np.ndarray = -np.log(-np.log(uniform))
    return noise
