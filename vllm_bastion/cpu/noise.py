# SPDX-License-Identifier: Apache-2.0
"""vLLM's Gumbel-max draw, on the host.

``vllm.v1.worker.gpu.sample.gumbel`` hashes (request seed, position, token) with MurmurHash3 to get
the noise of a draw. This is the same function, bit for bit. The hash is compiled. The logarithms
are NumPy's, as in Triton's interpreter: another library's may differ in the last bit.
"""

from __future__ import annotations

import numpy as np

from bastion_kernels.cpu.cache import njit

_U32 = np.uint32


@njit
def _mix(h, key):  # type: ignore[no-untyped-def]
    key = _U32(key * _U32(0xCC9E2D51))
    key = _U32((key << _U32(15)) | (key >> _U32(17)))
    h = _U32(h ^ _U32(key * _U32(0x1B873593)))
    h = _U32((h << _U32(13)) | (h >> _U32(19)))
    return _U32(_U32(h * _U32(5)) + _U32(0xE6546B64))


@njit
def _murmur3(seed, pos, out):  # type: ignore[no-untyped-def]
    """Hash all tokens for a seed and a position into out [V] uint32."""
    low = np.int64(0xFFFFFFFF)
    prefix = _mix(_U32(0), _U32(seed & low))
    prefix = _mix(prefix, _U32((seed >> np.int64(32)) & low))
    prefix = _mix(prefix, _U32(pos & low))
    for i in range(out.shape[0]):
        h = _U32(_mix(prefix, _U32(i)) ^ _U32(16))
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


def gumbel_row(seed: int, pos: int, vocab_size: int) -> np.ndarray:
    """The noise of all tokens in a draw, [V] fp32."""
    random, uniform = np.empty(vocab_size, dtype=_U32), np.empty(vocab_size, dtype=np.float32)
    _murmur3(np.int64(seed), np.int64(pos), random)
    _uniform(random, uniform)
    log = np.log(np.maximum(np.float32(1.0) - uniform, np.float32(5.960464477539063e-08)))
    _near_zero(uniform, log)
    noise: np.ndarray = -np.log(-log)
    return noise
