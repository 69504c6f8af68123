# SPDX-License-Identifier: Apache-2.0
"""The paper's estimators of T_verify, alternatives to the profile's curve. Imports no vLLM.

Section "Online Controller for Budget Optimization" divides the expected tokens of N nodes by

    C(N) = T_draft + T_aux + T_verify(N)

Appendix "Analytical Cost Modeling" predicts T_verify by a roofline, for s new tokens over c cached:

    FLOPs = L (4 s h h_q + 4 s h h_kv + 4 s (c + s) h_q + 6 s h h_ffn) + 2 s h V
    Bytes = bp [ 2 V h + s (h + V) + L ( 2 h (h_q + h_kv) + 3 h h_ffn + 2 h_kv (c + 2 s)
                                         + 4 s (h + h_q + h_ffn) + 2 n_q s (c + s) ) ]
    R(s, c) = max(Bytes / Bandwidth, FLOPs / PeakFLOPs)

with h_q = n_q d and h_kv = n_kv d. Two extensions reduce to it for R = 1 and tp = 1: R requests
share the rows evenly, so that s (c + s) becomes s (c + s / R) and c cached tokens are read R times;
and each of tp ranks has 1 / tp of the heads, the FFN and the vocabulary, but whole activations of
width h, and at least one key/value head.

Paragraph "Calibrated roofline as the default latency estimator" scales each branch by a line of its
own, per GPU and target. All four coefficients are >= 0, so the curve stays monotone and convex:

    T(s, c) = max( a_m * Bytes / Bandwidth + b_m,  a_c * FLOPs / PeakFLOPs + b_c )

Paragraph "Online alternatives when offline calibration is unavailable" corrects a curve by a moving
average of observed over predicted time, c <- (1 - alpha) c + alpha obs / pred. The estimators are
`static` (T), `ema` (c R) and `ema_calib` (c T).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares, nnls

FloatArray = NDArray[np.float64]
EstimatorName = Literal["static", "ema", "ema_calib"]

_ALPHA = 0.1  # of the moving average
# Curves are cached per (requests, context bucket); buckets are even in log(_SHORT + context).
_BUCKETS_PER_DOUBLING, _SHORT, _MAX_CACHED = 6, 64.0, 128


class DeviceSpec(NamedTuple):
    """PeakFLOPs (dense 16-bit matmuls, FLOP/s) and Bandwidth (bytes/s) of one device."""

    peak_flops: float
    bandwidth: float


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder in the appendix's notation (table "Notation")."""

    num_layers: int  # L
    hidden: int  # h
    num_heads: int  # n_q
    num_kv_heads: int  # n_kv
    head_dim: int  # d
    ffn: int  # h_ffn
    vocab: int  # V
    bytes_per_element: float = 2.0  # bp
    tp: int = 1

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | Any, *, bytes_per_element: float = 2.0, tp: int = 1
    ) -> ModelShape:
        """From the Hugging Face (text) config of a dense decoder, an object or a dict.

        Raises:
            ValueError: the entry named in the message is missing or not a positive integer.
        """

        def entry(name: str, default: int | None = None) -> int:
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"config entry {name!r} must be a positive integer, got {value!r}")
            return value

        hidden, heads = entry("hidden_size"), entry("num_attention_heads")
        kv_heads, head_dim = entry("num_key_value_heads", heads), entry("head_dim", hidden // heads)
        ffn, vocab = entry("intermediate_size"), entry("vocab_size")
        layers = entry("num_hidden_layers")
        return cls(layers, hidden, heads, kv_heads, head_dim, ffn, vocab, bytes_per_element, tp)

    @property
    def _sharded(self) -> tuple[float, float, float, float, float]:
        """n_q, h_q, h_kv, h_ffn, V of one rank."""
        heads, kv_heads = self.num_heads / self.tp, max(self.num_kv_heads / self.tp, 1.0)
        widths = heads * self.head_dim, kv_heads * self.head_dim
        return heads, *widths, self.ffn / self.tp, self.vocab / self.tp

    def flops(self, rows: ArrayLike, context_len: float, num_reqs: ArrayLike = 1) -> FloatArray:
        """Subsection "FLOPs": of one rank, for `rows` tokens over `context_len` per request."""
        s, c, h = np.asarray(rows, dtype=np.float64), float(context_len), float(self.hidden)
        _, h_q, h_kv, h_ffn, vocab = self._sharded
        attended = s * (c + s / np.asarray(num_reqs))
        per_layer = 4 * s * h * h_q + 4 * s * h * h_kv + 4 * attended * h_q + 6 * s * h * h_ffn
        return np.asarray(self.num_layers * per_layer + 2 * s * h * vocab)

    def bytes_moved(
        self, rows: ArrayLike, context_len: float, num_reqs: ArrayLike = 1
    ) -> FloatArray:
        """Subsection "Memory Traffic": bytes that one rank moves for the same pass."""
        s, c, h = np.asarray(rows, dtype=np.float64), float(context_len), float(self.hidden)
        n_q, h_q, h_kv, h_ffn, vocab = self._sharded
        weights = 2 * h * (h_q + h_kv) + 3 * h * h_ffn
        cache = 2 * h_kv * (c * np.asarray(num_reqs) + 2 * s)
        activations = 4 * s * (h + h_q + h_ffn) + 2 * n_q * s * (c + s / np.asarray(num_reqs))
        in_layers = self.num_layers * (weights + cache + activations)
        return np.asarray(self.bytes_per_element * (2 * vocab * h + s * (h + vocab) + in_layers))

    def branches_ms(
        self, device: DeviceSpec, rows: ArrayLike, context_len: float, num_reqs: ArrayLike = 1
    ) -> tuple[FloatArray, FloatArray]:
        """Bytes / Bandwidth and FLOPs / PeakFLOPs in milliseconds, shaped like `rows`."""
        memory = self.bytes_moved(rows, context_len, num_reqs) / device.bandwidth * 1e3
        return memory, self.flops(rows, context_len, num_reqs) / device.peak_flops * 1e3


class Lines(NamedTuple):
    """The coefficients of T; the default is the bare roofline R."""

    memory_slope: float = 1.0
    memory_offset_ms: float = 0.0
    compute_slope: float = 1.0
    compute_offset_ms: float = 0.0

    def predict_ms(self, memory_ms: FloatArray, compute_ms: FloatArray) -> FloatArray:
        """T of the two branches, shaped like them."""
        a_m, b_m, a_c, b_c = self
        return np.maximum(a_m * memory_ms + b_m, a_c * compute_ms + b_c)


def calibrate(
    rows: FloatArray, memory_ms: FloatArray, compute_ms: FloatArray, measured_ms: FloatArray
) -> Lines:
    """Fit T to measured passes, all [M] float64: robust to stalls and weighted by size.

    The residual at s rows is divided by 1 + 3 (s - s_min) / (s_max - s_min), because the budget is
    decided where rows are few.

    Raises:
        ValueError: there is no pass, or a time is not finite and positive.
    """
    if not len(rows) or not (np.isfinite(measured_ms) & (measured_ms > 0)).all():
        raise ValueError(f"calibration needs finite and positive times, got {measured_ms}")
    sigma = 1.0 + 3.0 * (rows - rows.min()) / max(np.ptp(rows), 1.0)
    # Slopes and offsets are scaled to be near one on every device.
    level = float(np.median(measured_ms))
    scale = np.array([level / np.median(memory_ms), level, level / np.median(compute_ms), level])

    def residuals(x: FloatArray) -> FloatArray:
        predicted = Lines(*(x * scale)).predict_ms(memory_ms, compute_ms)
        # Up to about 5% of the level is ordinary noise; more is discounted.
        return np.asarray((predicted - measured_ms) / (sigma * 0.05 * level))

    def line(branch_ms: FloatArray, where: NDArray[np.bool_]) -> FloatArray:
        """Slope and offset of the passes that one branch bounds; 0 without any."""
        design = np.stack([branch_ms, np.ones_like(branch_ms)], axis=1)[where] / sigma[where, None]
        return nnls(design, measured_ms[where] / sigma[where])[0] if len(design) else np.zeros(2)

    # The problem is not convex: start near (outliers aside), and where outliers have no influence.
    bound = compute_ms > memory_ms
    lines = np.concatenate([line(memory_ms, ~bound), line(compute_ms, bound)])
    starts = np.maximum(lines / scale, 1e-6), np.full(4, 0.5)
    # The Cauchy loss all but ignores outliers.
    fits = [least_squares(residuals, x, bounds=(0, np.inf), loss="cauchy") for x in starts]
    best = min(fits, key=lambda fit: float(fit.cost))
    return Lines(*(best.x * scale).tolist())


class Estimator:
    """T_verify by a step's rows.

    Args:
        name: which of the paper's estimators.
        shape, device: of the target and one rank.
        samples: measured passes `(rows, forward_ms)` with one request a row; unused by "ema".
        max_rows: most target rows of a step.
        context_len: cached tokens of each request in `samples`.
        captured_sizes: of the CUDA graphs; a step is padded to the next one, if there is one.

    Raises:
        ValueError: `calibrate` refuses the samples.
    """

    def __init__(
        self,
        name: EstimatorName,
        shape: ModelShape,
        device: DeviceSpec,
        samples: Sequence[tuple[int, float]],
        max_rows: int,
        context_len: float,
        captured_sizes: Sequence[int] = (),
    ) -> None:
        self._shape, self._device, self._padded = shape, device, _padded(max_rows, captured_sizes)
        self.factor, self.lines = 1.0, Lines()  # c, and the coefficients of T
        if name != "ema":
            rows, measured = np.array(samples, dtype=np.float64).reshape(-1, 2).T
            branches = shape.branches_ms(device, rows, context_len, rows)
            self.lines = calibrate(rows, *branches, measured)
        # The bare roofline can be far off, so its c starts from the first ratio, not from 1.
        self._weight = {"static": 0.0, "ema": 1.0, "ema_calib": _ALPHA}[name]
        self._seen: set[float] = set()
        self._curve = lru_cache(_MAX_CACHED)(self._make_curve)

    def verify_ms(self, num_reqs: int, context_len: float) -> FloatArray:
        """[max_rows + 1] float64 ms of the target's pass by rows, positive and non-decreasing.

        `context_len` is the mean of cached tokens per request; entry 0 is that of one row.
        """
        bucket = _BUCKETS_PER_DOUBLING * math.log2(1.0 + max(0.0, context_len) / _SHORT)
        return self.factor * self._curve(max(1, num_reqs), round(bucket))

    def observe(self, rows: int, num_reqs: int, context_len: float, forward_ms: float) -> None:
        """Move c by a pass of `rows` rows that took `forward_ms`; "static" learns nothing.

        Not counted: a padded size's first pass, which may compile, and times that are not positive.
        """
        row = min(max(rows, 1), len(self._padded) - 1)
        size = float(self._padded[row])
        if size not in self._seen:
            self._seen.add(size)
        elif self._weight and math.isfinite(forward_ms) and forward_ms > 0:
            ratio = self.factor * forward_ms / float(self.verify_ms(num_reqs, context_len)[row])
            self.factor += self._weight * (ratio - self.factor)
            self._weight = _ALPHA

    def _make_curve(self, num_reqs: int, bucket: int) -> FloatArray:
        context = _SHORT * (2.0 ** (bucket / _BUCKETS_PER_DOUBLING) - 1.0)
        of = self._padded, context, num_reqs
        return self.lines.predict_ms(*self._shape.branches_ms(self._device, *of))


def _padded(max_rows: int, captured_sizes: Sequence[int]) -> FloatArray:
    """[max_rows + 1] float64: rows that the target computes in a step of n rows."""
    rows = np.maximum(np.arange(max_rows + 1, dtype=np.float64), 1.0)
    sizes = np.unique(np.asarray(captured_sizes, dtype=np.float64))
    graph = np.searchsorted(sizes, rows)
    return np.where(graph < len(sizes), np.append(sizes, 0.0)[graph], rows)


def device_spec(device: torch.device, dtype: torch.dtype) -> DeviceSpec:
    """The peaks of a device, measured in half a second. All ranks must use one rank's."""
    cuda = device.type == "cuda"

    def seconds(work: Callable[[], object]) -> float:
        """The best of three, after a pass that allocates and chooses a kernel."""
        times = []
        for _ in range(4):
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    # The KV cache may have most of a GPU's memory; on a CPU the buffer must exceed its caches.
    copied = min(256 << 20, torch.cuda.mem_get_info(device)[0] // 4) if cuda else 128 << 20
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target, size = torch.empty_like(source), 4096 if cuda else 384
    a = torch.ones(size, size, dtype=dtype, device=device)
    peak_flops = 2 * size**3 / seconds(lambda: a @ a)
    # A copy reads and writes every byte.
    return DeviceSpec(peak_flops, 2 * copied / seconds(lambda: target.copy_(source)))
