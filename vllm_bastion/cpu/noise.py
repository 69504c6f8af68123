# SPDX-License-Identifier: Apache-2.0
"""vLLM's Gumbel-max draw, on the host.

``vllm.v1.worker.gpu.sample.gumbel`` keys the noise of a draw by (request seed, position, token)
through MurmurHash3. This is the same function in NumPy, bit for bit, for CPU machines, where
vLLM's kernel runs in Triton's interpreter at about 10 ms a row.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

_U32 = np.uint32


def _rotl(value: np.ndarray, shift: int) -> np.ndarray:
    return (value << _U32(shift)) | (value >> _U32(32 - shift))


def _mix(h: np.ndarray, key: np.ndarray) -> np.ndarray:
    key = _rotl(key * _U32(0xCC9E2D51), 15) * _U32(0x1B873593)
    return _rotl(h ^ key, 13) * _U32(5) + _U32(0xE6546B64)


def _murmur3(seeds: np.ndarray, pos: np.ndarray, vocab_size: int) -> np.ndarray:
    """[L] int64 seeds and positions to [L, V] uint32 hashes."""
    low = np.int64(0xFFFFFFFF)
    h = np.zeros(seeds.shape, dtype=_U32)
    h = _mix(h, (seeds & low).astype(_U32))
    h = _mix(h, ((seeds >> 32) & low).astype(_U32))
    h = _mix(h, (pos & low).astype(_U32))
    h = _mix(h[:, None], np.arange(vocab_size, dtype=_U32)[None, :]) ^ _U32(16)
    h ^= h >> _U32(16)
    h *= _U32(0x85EBCA6B)
    h ^= h >> _U32(13)
    h *= _U32(0xC2B2AE35)
    return h ^ (h >> _U32(16))


def _log1p_neg(value: np.ndarray) -> np.ndarray:
    """log(1 - value) as ``_log1p_neg_stable`` computes it, fp32."""
    one = np.float32(1.0)
    polynomial = np.full_like(value, np.float32(1.0 / 8.0))
    for order in range(7, 0, -1):
        polynomial = np.float32(1.0 / order) + value * polynomial
    direct = np.log(np.maximum(one - value, np.float32(5.960464477539063e-08)))
    return np.where(value < np.float32(0.25), -value * polynomial, direct)


def gumbel_noise(seeds: torch.Tensor, pos: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The noise of draws: [L] int64 seeds and positions to [L, V] fp32."""
    random = _murmur3(seeds.numpy(), pos.numpy(), vocab_size)
    uniform = (random >> _U32(16)).astype(np.float32) * np.float32(1.52587890625e-05) + (
        (random & _U32(0xFFFF)).astype(np.float32) + np.float32(0.5)
    ) * np.float32(2.3283064365386963e-10)
    return torch.from_numpy(-np.log(-_log1p_neg(uniform)))


def gumbel_sample_on_host(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool = False,
    is_drafting: bool = False,
    use_fp64: bool = False,
) -> torch.Tensor:
    """Draw a token for every row, equal to vLLM's ``gumbel_sample`` on CPU tensors.

    logits: [L, V] processed; expanded_idx_mapping: [L] slot of each row; temperature, seed: [S];
    pos: [L] int64. Returns [L] int64. The fp64 mode goes through vLLM's kernel.
    """
    if use_fp64 or apply_temperature or is_drafting:
        return gumbel_sample(
            logits,
            expanded_idx_mapping,
            temperature,
            seed,
            pos,
            apply_temperature=apply_temperature,
            is_drafting=is_drafting,
            use_fp64=use_fp64,
        )
    noised = logits.float()
    rows = (temperature[expanded_idx_mapping] != 0).nonzero().flatten()
    if rows.numel():
        slots = expanded_idx_mapping[rows]
        noise = gumbel_noise(seed[slots], pos[rows], logits.shape[1])
        noised = noised.index_add(0, rows, noise) if rows.numel() < len(noised) else noised + noise
    return noised.argmax(dim=-1)
