# SPDX-License-Identifier: Apache-2.0
"""The paper's estimators: its formulas by hand, what a calibration recovers, the moving average."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_bastion.policy.cost import (
    DeviceSpec,
    Estimator,
    Lines,
    ModelShape,
    calibrate,
    device_spec,
)

QWEN3_4B = {
    "num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
}  # fmt: skip
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288}
LLAMA_31_8B = QWEN3_8B | {
    "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
del LLAMA_31_8B["head_dim"]  # 4096 / 32 = 128

# FLOPs and bytes by hand, from the paper's terms with h_q = 4096 and h_kv = 1024. The first row:
#   4 s h h_q + 4 s h h_kv + 4 s (c + s) h_q + 6 s h h_ffn
#     = 41,943,040 + 10,485,760 + 16,384 + 149,422,080 = 201,867,264, x 36 = 7,267,221,504
#   2 s h V = 777,912,320; total 8,045,133,824 FLOPs
#   2 V h = 777,912,320; s (h + V) = 154,496
#   2 h (h_q + h_kv) + 3 h h_ffn + 2 h_kv (c + 2 s) + 4 s (h + h_q + h_ffn) + 2 n_q s (c + s)
#     = 26,214,400 + 74,711,040 + 4,096 + 65,536 + 64 = 100,995,136, x 36 = 3,635,824,896
#   total 4,413,891,712 elements = 8,827,783,424 bytes
BY_HAND = [
    (QWEN3_4B, 1, 0, 8_045_133_824, 8_827_783_424),
    (QWEN3_4B, 64, 1000, 555_015_471_104, 9_624_338_432),
    (QWEN3_8B, 1, 0, 15_136_784_384, 16_387_364_096),
    (QWEN3_8B, 64, 1000, 1_008_881_106_944, 17_258_430_464),
    (LLAMA_31_8B, 1, 0, 15_009_841_152, 16_066_288_128),
    (LLAMA_31_8B, 64, 1000, 996_298_194_944, 16_872_800_256),
]

SHAPE = ModelShape.from_config(QWEN3_8B)
A100 = DeviceSpec(312e12, 1935e9)


@pytest.mark.parametrize(("config", "rows", "context", "flops", "moved"), BY_HAND)
def test_flops_and_bytes_worked_out_by_hand(config, rows, context, flops, moved):
    shape = ModelShape.from_config(config)
    assert (shape.flops(rows, context), shape.bytes_moved(rows, context)) == (flops, moved)


def test_config_objects_and_dicts_agree():
    assert ModelShape.from_config(SimpleNamespace(**QWEN3_8B)) == SHAPE
    assert ModelShape.from_config(LLAMA_31_8B).head_dim == 128
    no_gqa = {k: v for k, v in LLAMA_31_8B.items() if k != "num_key_value_heads"}
    assert ModelShape.from_config(no_gqa).num_kv_heads == 32


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "many", 2.5, True])
def test_bad_config_names_the_entry(name, value):
    with pytest.raises(ValueError, match=name):
        ModelShape.from_config(QWEN3_8B | {name: value})


def test_tensor_parallel_divides_what_is_sharded():
    one, four, eight, sixteen = (ModelShape.from_config(QWEN3_8B, tp=tp) for tp in (1, 4, 8, 16))
    assert four.flops(16, 512) * 4 == one.flops(16, 512)
    # activations of width h stay whole: s h in the head and 4 s h per layer
    whole = 2 * (16 * 4096 + 36 * 4 * 16 * 4096)
    assert (four.bytes_moved(16, 512) - whole) * 4 == one.bytes_moved(16, 512) - whole
    # 16 ranks, 8 key/value heads: a rank keeps one whole head. A cached token is 2 h_kv elements,
    # and 2 n_q / tp of scores, per layer.
    cache = [s.bytes_moved(1, 4001) - s.bytes_moved(1, 4000) for s in (eight, sixteen)]
    assert cache == [2 * 36 * (256 + 8), 2 * 36 * (256 + 4)]


def test_a_batch_reads_every_context_and_attends_its_own_rows():
    # two requests of 32 rows over 500 tokens each are two halves: attention and KV twice one's,
    # weights once
    weights = SHAPE.bytes_moved(0, 0)
    assert SHAPE.flops(64, 500, 2) == 2 * SHAPE.flops(32, 500, 1)
    assert SHAPE.bytes_moved(64, 500, 2) - weights == 2 * (SHAPE.bytes_moved(32, 500) - weights)


def test_a_cpu_is_measured():
    spec = device_spec(torch.device("cpu"), torch.float32)
    assert 1e8 < spec.peak_flops < 1e15 and 1e8 < spec.bandwidth < 1e14


# --- calibration ------------------------------------------------------------------------------

ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512]
CONTEXTS = [64, 256, 1024, 4096]
S, C = (np.array(v, dtype=float).ravel() for v in np.meshgrid(ROWS, CONTEXTS, indexing="ij"))
MEMORY, COMPUTE = np.array([SHAPE.branches_ms(A100, s, c) for s, c in zip(S, C)]).T
TRUTH = Lines(1.4, 3.0, 1.9, 6.0)
EXACT = np.maximum(1.4 * MEMORY + 3.0, 1.9 * COMPUTE + 6.0)


def fit(measured, where=slice(None)):
    return calibrate(S[where], MEMORY[where], COMPUTE[where], measured[where])


def noisy(sigma, seed=0):
    return EXACT * (1 + sigma * np.random.default_rng(seed).standard_normal(len(EXACT)))


def error(lines, measured, where=slice(None)):
    return np.sqrt(np.mean((lines.predict_ms(MEMORY, COMPUTE) - measured)[where] ** 2))


def test_both_lines_are_recovered():
    lines = fit(EXACT)
    assert (lines.memory_slope, lines.compute_slope) == pytest.approx((1.4, 1.9), rel=0.02)
    assert (lines.memory_offset_ms, lines.compute_offset_ms) == pytest.approx((3.0, 6.0), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_outliers_are_outvoted(seed):
    measured = noisy(0.01, seed)
    at = [3, 17, 30, 41] if seed == 0 else np.random.default_rng(seed).permutation(len(S))[:4]
    measured[at] *= 20.0, 8.0, 50.0, 0.05
    off = np.abs(fit(measured).predict_ms(MEMORY, COMPUTE) / EXACT - 1)
    assert np.median(off) < 0.03 and np.max(off) < 0.15


def test_the_error_of_unseen_passes_falls_as_in_the_paper():
    """By 87 to 90% there; here one context is not fitted."""
    measured, unseen = noisy(0.02), C == 256
    before, after = Lines(), fit(measured, ~unseen)
    assert error(after, measured, unseen) < 0.13 * error(before, measured, unseen)


def test_passes_of_one_branch_and_of_overhead_alone_are_fitted():
    assert error(fit(EXACT, S <= 32), EXACT, S <= 32) < 0.05
    assert error(fit(90.0 + 0.001 * S), 90.0 + 0.001 * S) < 0.2


def test_what_is_no_measurement_is_refused():
    for samples in ([], [(1, 0.0)], [(1, 2.0), (2, np.nan)], [(1, np.inf)]):
        with pytest.raises(ValueError, match="finite and positive"):
            Estimator("static", SHAPE, A100, samples, 64, 64.0)


# --- estimators -------------------------------------------------------------------------------

SIZES = (1, 8, 16, 32, 64)


def profile():
    """vLLM's profile: one request a row, 960 cached tokens each."""
    rows = np.array([*SIZES, 128, 256, 512, 1024], dtype=float)
    ms = TRUTH.predict_ms(*SHAPE.branches_ms(A100, rows, 960, rows))
    return list(zip(rows.astype(int).tolist(), ms.tolist()))


def make(name, sizes=SIZES):
    return Estimator(name, SHAPE, A100, profile(), 100, 960.0, sizes)


def roofline_by_hand(s, c, requests):
    """R(s, c) of Qwen3-8B on an A100, the paper's two sums written out."""
    attended = s * (c + s / requests)
    flops = 36 * (4 * s * 4096 * 4096 + 4 * s * 4096 * 1024 + 4 * attended * 4096
                  + 6 * s * 4096 * 12288) + 2 * s * 4096 * 151936  # fmt: skip
    elements = 2 * 151936 * 4096 + s * (4096 + 151936) + 36 * (
        2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288 + 2 * 1024 * (c * requests + 2 * s)
        + 4 * s * (4096 + 4096 + 12288) + 2 * 32 * attended)  # fmt: skip
    return max(2 * elements / 1935e9, flops / 312e12) * 1e3


@pytest.mark.parametrize(("requests", "context"), [(1, 0), (4, 0), (1, 960), (16, 4032)])
def test_ema_starts_from_the_bare_roofline_at_the_padded_sizes(requests, context):
    # these contexts are those of their buckets: 64 (2^k - 1)
    curve = make("ema").verify_ms(requests, context)
    assert curve.shape == (101,) and curve.dtype == np.float64
    padded = [next((size for size in SIZES if size >= max(n, 1)), n) for n in range(101)]
    assert curve == pytest.approx([roofline_by_hand(s, context, requests) for s in padded])


@pytest.mark.parametrize("name", ["static", "ema_calib"])
def test_the_profile_calibrates_the_curve_of_trees(name):
    """Measured with a request a row, it predicts rows that share a context."""
    curve = make(name, ()).verify_ms(2, 960)
    exact = TRUTH.predict_ms(*SHAPE.branches_ms(A100, np.arange(1.0, 101), 960, 2))
    assert curve[1:] == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("name", ["static", "ema", "ema_calib"])
@pytest.mark.parametrize("sizes", [(), SIZES])
def test_curves_are_positive_rising_and_convex_without_graphs(name, sizes):
    for requests, context in ((1, 0), (3, 100), (64, 50_000)):
        curve = make(name, sizes).verify_ms(requests, context)
        assert (curve > 0).all() and (np.diff(curve) >= 0).all()
        assert sizes or (np.diff(curve[1:], 2) > -1e-9).all()


def test_contexts_of_a_bucket_share_a_curve_at_most_6_percent_off():
    model = make("ema")
    assert model.verify_ms(1, 1000)[64] == model.verify_ms(1, 1010)[64]
    for context in (7, 100, 1234, 31_000):
        low, high = (64 * (f - 1) + f * context for f in (0.94, 1.06))
        found = model.verify_ms(1, context)[64]
        assert roofline_by_hand(64, low, 1) <= found <= roofline_by_hand(64, high, 1)


def test_the_papers_average():
    """c <- 0.9 c + 0.1 obs / pred, from the first ratio for `ema` and from 1 for `ema_calib`."""
    for name, start in (("ema", None), ("ema_calib", 1.0)):
        model, c = make(name), start
        predicted = model.verify_ms(1, 0)[16]
        model.observe(9, 1, 0, 1e4)  # the first pass of 16 padded rows
        assert model.factor == 1.0
        for ratio in (3.0, 2.0, 2.5, 4.0, 0.5):
            model.observe(12, 1, 0, ratio * predicted)
            c = ratio if c is None else 0.9 * c + 0.1 * ratio
            assert model.factor == pytest.approx(c)
            assert model.verify_ms(1, 0)[16] == pytest.approx(c * predicted)


def test_static_learns_nothing_and_no_other_from_what_is_no_time():
    for name in ("static", "ema", "ema_calib"):
        model = make(name)
        times = [0.0, -1.0, np.nan, np.inf] if name != "static" else [500.0]
        for ms in 3 * times:
            model.observe(8, 1, 0, ms)
        assert model.factor == 1.0
