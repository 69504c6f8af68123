# SPDX-License-Identifier: Apache-2.0
"""vLLM's Gumbel-max draw, on the host.

``vllm.v1.worker.gpu.sample.gumbel`` hashes (request seed, position, token) with MurmurHash3 to get
the noise of a draw. This is the same function, bit for bit. The hash is compiled. The logarithms
are NumPy's, as in Triton's interpreter: another library's may differ in the last bit.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

from bastion_kernels.cpu.cache import njit
from bastion_kernels.cpu.scratch import scratch

_U32 = np.uint32
# Makes a drafter's noise independent of the target's; vLLM's `_DRAFT_NOISE_SALT`.
DRAFT_SALT = 1 << 30
_FP64_DOMAIN = 0x9E3779B9  # of the second hash of an fp64 draw
# Bounds on the noise of any draw, as u >= 2**-33 and 1 - u >= 2**-24.
_MAX_NOISE, _MIN_NOISE = 23.0, -2.83
_MIN_LOG = -24 * math.log(2)  # of 1 - u
_BLOCK = 64  # tokens that share one upper bound
_SMALL_VOCAB = 4096  # up to this size, computing all of the noise is faster


@njit
def _mix(h, key):  # type: ignore[no-untyped-def]
    key = _U32(key * _U32(0xCC9E2D51))
    key = _U32((key << _U32(15)) | (key >> _U32(17)))
    h = _U32(h ^ _U32(key * _U32(0x1B873593)))
    h = _U32((h << _U32(13)) | (h >> _U32(19)))
    return _U32(_U32(h * _U32(5)) + _U32(0xE6546B64))


@njit
def _prefix(seed, pos, domain):  # type: ignore[no-untyped-def]
    """The state of the hash before the token."""
    low = np.int64(0xFFFFFFFF)
    h = _mix(_U32(domain), _U32(seed & low))
    h = _mix(h, _U32((seed >> np.int64(32)) & low))
    return _mix(h, _U32(pos & low))


@njit
def _finish(prefix, token):  # type: ignore[no-untyped-def]
    h = _U32(_mix(prefix, _U32(token)) ^ _U32(16))
    h = _U32(_U32(h ^ (h >> _U32(16))) * _U32(0x85EBCA6B))
    h = _U32(_U32(h ^ (h >> _U32(13))) * _U32(0xC2B2AE35))
    return _U32(h ^ (h >> _U32(16)))


@njit
def _murmur3(seed, pos, domain, tokens, out):  # type: ignore[no-untyped-def]
    """Hash tokens [K] for a seed and a position into out [K] uint32."""
    prefix = _prefix(seed, pos, domain)
    for i in range(out.shape[0]):
        out[i] = _finish(prefix, tokens[i])


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


@njit
def _may_win(logits, seed, pos, random, out):  # type: ignore[no-untyped-def]
    """Find the tokens that may have the largest logit + noise, usually a few.

    logits: [V] fp32; out: [V] int32, gets the tokens in ascending order; random: [V] uint32, gets
    their hashes and is scratch beyond them. Returns how many there are, or -1 if the largest logit
    is not finite.

    Almost all tokens are ruled out cheaply: they stay below the best score so far even with the
    largest possible noise, or with the bound -log(-log(1 - u)) < -log(u) on their own noise.
    The others are compared by their noise in fp64, with a margin for fp32's rounding, which is at
    most 0.03 near u = 1.
    """
    size, prefix = logits.shape[0], _prefix(seed, pos, 0)
    blocks = (size + _BLOCK - 1) // _BLOCK
    tops = np.empty(blocks, np.float32)
    largest, nans = np.float32(-np.inf), 0
    for block in range(blocks):
        top = np.float32(-np.inf)
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, size)):
            value = logits[i]
            top = value if value > top else top
            nans += value != value
        tops[block] = top
        largest = max(largest, top)
    if nans or not abs(largest) < np.inf:
        return -1
    best = largest + _MIN_NOISE
    count = 0
    for block in range(blocks):
        top = np.float64(tops[block])
        if top + _MAX_NOISE < best:
            continue
        margin = 0.1 + 1e-6 * abs(best)
        wanted = best - margin - top
        # The largest hash with which the block's largest logit can still win.
        max_hash = _U32(0xFFFFFFFF)
        if wanted > 0.01:
            max_hash = _U32(math.exp(-wanted) * 4294967296.0 * 1.0001 + 2.0)
        start = block * _BLOCK
        end = min(start + _BLOCK, size)
        hashes = random[count : count + end - start]
        for i in range(end - start):
            hashes[i] = _finish(prefix, start + i)
        found = 0
        for i in range(end - start):
            hashed = hashes[i]
            if hashed > max_hash:
                continue
            u = (np.float64(hashed) + 0.5) / 4294967296.0
            noise = -math.log(-max(math.log1p(-u), _MIN_LOG))
            score = np.float64(logits[start + i]) + noise
            if score >= best - margin:
                out[count + found], hashes[found] = start + i, hashed
                found += 1
                best = max(best, score)
        count += found
    return count


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


def gumbel_argmax(logits: np.ndarray, seed: int, pos: int) -> int:
    """The first token with the largest of logits [V] fp32 + noise."""
    if len(logits) <= _SMALL_VOCAB:
        return int((logits + gumbel_row(seed, pos, len(logits))).argmax())
    tokens, random = scratch(torch.int32, len(logits)).numpy(), _random(len(logits))
    count = _may_win(logits, np.int64(seed), np.int64(pos), random, tokens)
    if count < 0:
        return int(torch.from_numpy(logits + gumbel_row(seed, pos, len(logits))).argmax())
    tokens = tokens[:count]
    return int(tokens[np.argmax(logits[tokens] + _noise(random[:count]))])


def _random(size: int) -> np.ndarray:
    return scratch(torch.int64, size).numpy().view(np.uint32)[:size]


def _noise_fp64(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Map two hashes of each token, [V] uint32, to noise [V] fp64."""
    random53 = ((high.astype(np.uint64) << np.uint64(32)) | low) >> np.uint64(11)
    uniform = (random53.astype(np.float64) + 0.5) * 1.1102230246251565e-16
    uniform[uniform == 1.0] -= 1.1102230246251565e-16
    noise: np.ndarray = -np.log(-np.log(uniform))
    return noise


def gumbel_noise(seeds: torch.Tensor, pos: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The noise of draws with seeds and positions [L] int64, as [L, V] fp32."""
    rows = zip(seeds.tolist(), pos.tolist(), strict=True)
    noise = [gumbel_row(seed, position, vocab_size) for seed, position in rows]
    return torch.from_numpy(np.stack(noise)) if noise else torch.empty(0, vocab_size)


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

    logits: [L, V] processed; expanded_idx_mapping: [L] request slot of each row; temperature,
    seed: [S]; pos: [L] int64. Returns [L] int64. Draws in fp64, with temperature or for a drafter
    go through vLLM's function.
    """
    if use_fp64 or apply_temperature or is_drafting:
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

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
    drawn = logits.new_empty(len(logits), dtype=torch.int64)
    slots = expanded_idx_mapping
    temperatures, seeds, positions = temperature[slots].tolist(), seed[slots].tolist(), pos.tolist()
    for i, row in enumerate(logits):
        if temperatures[i]:
            drawn[i] = gumbel_argmax(row.float().numpy(), seeds[i], positions[i])
        else:
            drawn[i] = row.argmax()
    return drawn
