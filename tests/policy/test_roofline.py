# SPDX-License-Identifier: Apache-2.0
"""The appendix's roofline, worked out by hand for three models, and what a calibration makes of it.

It recovers known coefficients and survives outliers.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_bastion.policy.cost.devices import DeviceSpec, known_device, measure_device
from vllm_bastion.policy.cost.paper import (
    CalibratedRoofline,
    ModelShape,
    Roofline,
    calibrate,
)

QWEN3_4B = {
    "num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = QWEN3_4B | {
    "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_31_8B = QWEN3_8B | {
    "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
del LLAMA_31_8B["head_dim"]  # 4096 / 32 = 128

# FLOPs and bytes by hand, from the paper's terms with h_q = 4096 and h_kv = 1024. The first row:
#
# FLOPs, s = 1, c = 0
#   4 s h h_q     = 4 * 2560 * 4096        =  41,943,040
#   4 s h h_kv    = 4 * 2560 * 1024        =  10,485,760
#   4 s (c+s) h_q = 4 * 1 * 4096           =      16,384
#   6 s h h_ffn   = 6 * 2560 * 9728        = 149,422,080
#   layer sum                                201,867,264   x 36 = 7,267,221,504
#   2 s h V       = 2 * 2560 * 151936      = 777,912,320; total 8,045,133,824
# Elements moved (x bp = 2 gives bytes)
#   2 V h = 777,912,320; s (h + V) = 154,496
#   layer: 2 h (h_q + h_kv) = 2 * 2560 * 5120    = 26,214,400
#          3 h h_ffn        = 3 * 2560 * 9728    = 74,711,040
#          2 h_kv (c + 2 s) = 2 * 1024 * 2       =      4,096
#          4 s (h + h_q + h_ffn) = 4 * 16,384    =     65,536
#          2 n_q s (c + s)  = 2 * 32             =         64
#          sum 100,995,136, x 36 = 3,635,824,896
#   total 4,413,891,712 elements = 8,827,783,424 bytes
BY_HAND = [
    (QWEN3_4B, 1, 0, 8_045_133_824, 8_827_783_424),
    (QWEN3_4B, 64, 1000, 555_015_471_104, 9_624_338_432),
    (QWEN3_8B, 1, 0, 15_136_784_384, 16_387_364_096),
    (QWEN3_8B, 64, 1000, 1_008_881_106_944, 17_258_430_464),
    (LLAMA_31_8B, 1, 0, 15_009_841_152, 16_066_288_128),
    (LLAMA_31_8B, 64, 1000, 996_298_194_944, 16_872_800_256),
]

# 1 TFLOP/s and 1 TB/s: milliseconds are giga-units
UNIT = DeviceSpec("unit", 1e12, 1e12, "test")


@pytest.mark.parametrize(("config", "rows", "context", "flops", "moved"), BY_HAND)
def test_flops_and_bytes_worked_out_by_hand(config, rows, context, flops, moved):
    shape = ModelShape.from_config(config)
    assert (shape.flops(rows, context), shape.bytes_moved(rows, context)) == (flops, moved)


def test_config_objects_dicts_and_multimodal_wrappers_agree():
    shape = ModelShape.from_config(QWEN3_4B)
    assert ModelShape.from_config(SimpleNamespace(**QWEN3_4B)) == shape
    assert ModelShape.from_config({"text_config": QWEN3_4B}) == shape
    assert ModelShape.from_config(LLAMA_31_8B).head_dim == 128
    no_gqa = {k: v for k, v in LLAMA_31_8B.items() if k != "num_key_value_heads"}
    assert ModelShape.from_config(no_gqa).num_kv_heads == 32


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "many", 2.5, True])
def test_bad_config_names_the_entry(name, value):
    with pytest.raises(ValueError, match=name):
        ModelShape.from_config(QWEN3_8B | {name: value})


def test_element_width_scales_bytes_only():
    half, byte = (ModelShape.from_config(QWEN3_8B, bytes_per_element=bp) for bp in (2, 1))
    assert byte.bytes_moved(8, 100) * 2 == half.bytes_moved(8, 100)
    assert byte.flops(8, 100) == half.flops(8, 100)


def test_tensor_parallel_divides_what_is_sharded():
    one, four = (ModelShape.from_config(QWEN3_8B, tp=tp) for tp in (1, 4))
    assert four.flops(16, 512) * 4 == one.flops(16, 512)
    # activations of width h stay whole: s h in the head and 4 s h per layer
    whole = 2 * (16 * 4096 + 36 * 4 * 16 * 4096)
    assert (four.bytes_moved(16, 512) - whole) * 4 == one.bytes_moved(16, 512) - whole
    # 16 ranks, 8 key/value heads: a rank keeps one whole head
    cache = [
        ModelShape.from_config(QWEN3_8B, tp=tp).bytes_moved(1, 4001)
        - ModelShape.from_config(QWEN3_8B, tp=tp).bytes_moved(1, 4000)
        for tp in (8, 16)
    ]
    # a cached token: 2 h_kv elements, and 2 n_q / tp of scores, per layer
    assert cache == [2 * 36 * (256 + 8), 2 * 36 * (256 + 4)]


def test_a_batch_reads_every_context_and_attends_its_own_rows():
    shape = ModelShape.from_config(QWEN3_8B)
    # two requests of 32 rows over 500 tokens each are two halves: attention and KV twice one's,
    # weights once
    weights = shape.bytes_moved(0, 0)
    assert shape.flops(64, 500, 2) == 2 * shape.flops(32, 500, 1)
    assert shape.bytes_moved(64, 500, 2) - weights == 2 * (shape.bytes_moved(32, 500, 1) - weights)


def test_roofline_is_the_larger_branch():
    roof = Roofline(ModelShape.from_config(QWEN3_8B), UNIT)
    rows = np.array([1.0, 64.0])
    # 1 row: 16.39 GB against 15.14 GFLOP; 64 rows: 17.26 GB against 1,009 GFLOP
    np.testing.assert_allclose(roof.predict_ms(rows[:1], 0), [16.387364096])
    np.testing.assert_allclose(roof.predict_ms(rows[1:], 1000), [1008.881106944])


def test_latency_is_convex_in_rows():
    shape = ModelShape.from_config(QWEN3_8B)
    for device in (UNIT, DeviceSpec("a100", 312e12, 1935e9, "test")):
        curve = Roofline(shape, device).predict_ms(np.arange(1, 1025, dtype=float), 2048)
        assert (np.diff(curve, 2) > -1e-9).all()


@pytest.mark.parametrize(
    ("name", "peak", "bandwidth"),
    [
        ("NVIDIA A100 80GB PCIe", 312e12, 1935e9), ("NVIDIA A100-SXM4-80GB", 312e12, 2039e9),
        ("NVIDIA A100-PCIE-40GB", 312e12, 1555e9), ("NVIDIA A100-SXM4-40GB", 312e12, 1555e9),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 3350e9), ("NVIDIA H100 PCIe", 756.5e12, 2000e9),
        ("NVIDIA H200", 989.5e12, 4800e9), ("NVIDIA RTX A6000", 154.8e12, 768e9),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12, 1792e9),
        ("NVIDIA L40S", 362.05e12, 864e9), ("NVIDIA GeForce RTX 4090", 165.2e12, 1008e9),
        ("NVIDIA B200", 2250e12, 8000e9),
    ],
)  # fmt: skip
def test_known_devices_by_their_cuda_names(name, peak, bandwidth):
    spec = known_device(name)
    assert spec is not None and spec.source
    assert (spec.peak_flops, spec.bandwidth) == (peak, bandwidth)


def test_an_unknown_device_is_none_and_the_cpu_is_measured():
    assert known_device("NVIDIA GeForce GTX 1080") is None
    spec = measure_device("cpu", copy_bytes=1 << 20, matmul_size=64)
    assert spec.source == "measured"
    assert 1e6 < spec.peak_flops < 1e15 and 1e6 < spec.bandwidth < 1e14


# --- the calibrated curve ---------------------------------------------------------------------

A100 = Roofline(ModelShape.from_config(QWEN3_8B), DeviceSpec("A100", 312e12, 1935e9, "test"))
ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512]
CONTEXTS = [64, 256, 1024, 4096]
TRUTH = CalibratedRoofline(A100, 1.4, 3.0, 1.9, 6.0)


def _grid(noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (s, c, float(TRUTH.predict_ms(s, c)) * (1 + noise * rng.standard_normal()))
        for s in ROWS
        for c in CONTEXTS
    ]


def test_both_branches_are_recovered():
    fitted = calibrate(A100, _grid())
    assert fitted.memory_slope == pytest.approx(1.4, rel=0.02)
    assert fitted.memory_offset_ms == pytest.approx(3.0, rel=0.1)
    assert fitted.compute_slope == pytest.approx(1.9, rel=0.02)
    assert fitted.compute_offset_ms == pytest.approx(6.0, rel=0.1)


def test_outliers_are_outvoted():
    samples = _grid(noise=0.01)
    for index, factor in ((3, 20.0), (17, 8.0), (30, 50.0), (41, 0.05)):
        s, c, ms = samples[index]
        samples[index] = (s, c, ms * factor)
    fitted = calibrate(A100, samples)
    clean = np.array([float(TRUTH.predict_ms(s, c)) for s, c, _ in samples])
    got = np.array([float(fitted.predict_ms(s, c)) for s, c, _ in samples])
    assert np.median(np.abs(got / clean - 1)) < 0.03
    assert np.max(np.abs(got / clean - 1)) < 0.15


def test_a_grid_of_one_branch_leaves_a_usable_curve():
    memory_bound = [(s, c, ms) for s, c, ms in _grid() if s <= 32]
    fitted = calibrate(A100, memory_bound)
    assert all(abs(float(fitted.predict_ms(s, c)) - ms) < 0.1 for s, c, ms in memory_bound)
    curve = fitted.predict_ms(np.arange(1, 1025, dtype=float), 256)
    assert np.isfinite(curve).all() and (curve > 0).all() and (np.diff(curve) >= 0).all()


def test_calibrated_curve_stays_convex_and_monotone():
    fitted = calibrate(A100, _grid(noise=0.05, seed=3))
    for context in (0, 1000, 50_000):
        curve = fitted.predict_ms(np.arange(1, 2049, dtype=float), context)
        assert (np.diff(curve) >= 0).all() and (np.diff(curve, 2) > -1e-9).all()


def test_an_engine_dominated_by_overhead_is_a_constant():
    samples = [(s, c, 90.0 + 0.001 * s) for s in ROWS for c in CONTEXTS]
    fitted = calibrate(A100, samples)
    assert all(abs(float(fitted.predict_ms(s, c)) - ms) < 0.5 for s, c, ms in samples)


def test_small_steps_weigh_more_than_large_ones():
    # falling times cannot be fitted by a rising curve: the best constant is a weighted mean, which
    # must lie nearer to what the small steps cost
    samples = [(s, 64, 20.4 if s <= 4 else 20.0) for s in (1, 2, 3, 4, 29, 30, 31, 32)]
    fitted = calibrate(A100, samples)
    assert 20.3 < float(fitted.predict_ms(16, 64)) < 20.4


def test_one_point_and_no_point():
    fitted = calibrate(A100, [(8, 64, 33.0)])
    assert float(fitted.predict_ms(8, 64)) == pytest.approx(33.0, rel=0.01)
    with pytest.raises(ValueError, match="at least one"):
        calibrate(A100, [])
