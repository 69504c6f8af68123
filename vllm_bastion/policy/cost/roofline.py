# SPDX-License-Identifier: Apache-2.0
"""FLOPs, bytes and the bare roofline of one forward pass of a dense decoder.

The paper's appendix "Analytical Cost Modeling", term by term, for s new tokens over c cached ones:

    FLOPs = L (4 s h h_q + 4 s h h_kv + 4 s (c + s) h_q + 6 s h h_ffn) + 2 s h V
    Bytes = bp [ 2 V h + s (h + V) + L ( 2 h (h_q + h_kv) + 3 h h_ffn + 2 h_kv (c + 2 s)
                                         + 4 s (h + h_q + h_ffn) + 2 n_q s (c + s) ) ]
    R(s, c) = max(FLOPs / PeakFLOPs, Bytes / Bandwidth)

with h_q = n_q d and h_kv = n_kv d, a multiply-add as 2 FLOPs, attention unfused, and a tied
embedding counted twice because it is read at two stages.

Two extensions reduce to the paper's formula for R = 1 and tp = 1. With R requests the rows are
divided evenly: s (c + s) becomes s (c + s / R), and the cached context is read once per request.
With tensor parallelism `tp` each rank has 1 / tp of the heads, the FFN and the vocabulary, while
activations of width h are replicated. If there are fewer key/value heads than `tp`, they are
replicated too, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_bastion.policy.cost.devices import DeviceSpec
from vllm_bastion.policy.cost.forward_times import FloatArray


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the cost model needs, in the paper's notation."""

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
        """From a Hugging Face config of a dense decoder (object or dict).

        `head_dim` is derived if the config has none, `num_key_value_heads` defaults to the number
        of query heads, and of a multimodal config the `text_config` is used.

        Raises:
            ValueError: the entry named in the message is missing or not a positive integer.
        """
        inner = _entry(config, "text_config")
        config = config if inner is None else inner
        heads = _positive(config, "num_attention_heads")
        hidden = _positive(config, "hidden_size")
        kv_heads = _entry(config, "num_key_value_heads")
        head_dim = _entry(config, "head_dim")
        return cls(
            num_layers=_positive(config, "num_hidden_layers"),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(kv_heads) if kv_heads else heads,
            head_dim=int(head_dim) if head_dim else hidden // heads,
            ffn=_positive(config, "intermediate_size"),
            vocab=_positive(config, "vocab_size"),
            bytes_per_element=bytes_per_element,
            tp=tp,
        )

    @property
    def _sharded(self) -> tuple[float, float, float, float, float]:
        """n_q, h_q, h_kv, h_ffn, V of one rank."""
        kv_heads = max(self.num_kv_heads / self.tp, 1.0)
        heads = self.num_heads / self.tp
        return (
            heads,
            heads * self.head_dim,
            kv_heads * self.head_dim,
            self.ffn / self.tp,
            self.vocab / self.tp,
        )

    def flops(self, rows: FloatArray | float, context_len: float, num_reqs: int = 1) -> FloatArray:
        """FLOPs of one rank for `rows` new tokens over `context_len` cached ones per request."""
        s = np.asarray(rows, dtype=np.float64)
        c, h = float(context_len), float(self.hidden)
        _, h_q, h_kv, h_ffn, vocab = self._sharded
        attended = s * (c + s / num_reqs)
        per_layer = 4 * s * h * h_q + 4 * s * h * h_kv + 4 * attended * h_q + 6 * s * h * h_ffn
        return np.asarray(self.num_layers * per_layer + 2 * s * h * vocab)

    def bytes_moved(
        self, rows: FloatArray | float, context_len: float, num_reqs: int = 1
    ) -> FloatArray:
        """Bytes that one rank moves for the same pass."""
        s = np.asarray(rows, dtype=np.float64)
        c, h = float(context_len), float(self.hidden)
        n_q, h_q, h_kv, h_ffn, vocab = self._sharded
        attended = s * (c + s / num_reqs)
        weights = 2 * h * (h_q + h_kv) + 3 * h * h_ffn
        cache = 2 * h_kv * (c * num_reqs + 2 * s)
        activations = 4 * s * (h + h_q + h_ffn) + 2 * n_q * attended
        elements = (
            2 * vocab * h + s * (h + vocab) + self.num_layers * (weights + cache + activations)
        )
        return np.asarray(self.bytes_per_element * elements)


@dataclass(frozen=True)
class Roofline:
    """R(s, c): the bare prediction, in milliseconds."""

    shape: ModelShape
    device: DeviceSpec

    def memory_ms(
        self, rows: FloatArray | float, context_len: float, num_reqs: int = 1
    ) -> FloatArray:
        """Bytes / Bandwidth."""
        return self.shape.bytes_moved(rows, context_len, num_reqs) / self.device.bandwidth * 1e3

    def compute_ms(
        self, rows: FloatArray | float, context_len: float, num_reqs: int = 1
    ) -> FloatArray:
        """FLOPs / PeakFLOPs."""
        return self.shape.flops(rows, context_len, num_reqs) / self.device.peak_flops * 1e3

    def predict_ms(
        self, rows: FloatArray | float, context_len: float, num_reqs: int = 1
    ) -> FloatArray:
        """The larger of the two; makes this class a `Carrier`."""
        return np.maximum(
            self.memory_ms(rows, context_len, num_reqs),
            self.compute_ms(rows, context_len, num_reqs),
        )


def _entry(config: Mapping[str, Any] | Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _positive(config: Mapping[str, Any] | Any, name: str) -> int:
    value = _entry(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config entry {name!r} must be a positive integer, got {value!r}")
    return value
