# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s and memory bandwidth: from data sheets for known GPUs, measured for other devices.

The peaks are dense bf16 tensor throughput with fp32 accumulation (half the sparse figure if the
data sheet has only that) and nominal memory bandwidth, in decimal units.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceSpec:
    """The peak rates of one device."""

    name: str
    peak_flops: float  # FLOP/s
    bandwidth: float  # bytes/s
    source: str


# Words that must all be in torch's device name in lower case, name, dense bf16 TFLOP/s, GB/s, and
# the source. Most specific first: the memory size tells the two A100 generations apart.
_KNOWN: tuple[tuple[tuple[str, ...], str, float, float, str], ...] = (
    # A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950): 312 TFLOPS; 80 GB PCIe 1,935 GB/s,
    # 80 GB SXM 2,039 GB/s, 40 GB (both forms) 1,555 GB/s.
    (("a100", "pcie", "80gb"), "A100 PCIe 80GB", 312, 1935, "A100"),
    (("a100", "sxm", "80gb"), "A100 SXM 80GB", 312, 2039, "A100"),
    (("a100", "40gb"), "A100 40GB", 312, 1555, "A100"),
    (("a100", "80gb"), "A100 PCIe 80GB", 312, 1935, "A100"),
    # H100 data sheet (nvidia-tensor-core-gpu-datasheet): 1,979 / 1,513 / 1,671 TFLOPS with
    # sparsity, 3.35 / 2.0 / 3.9 TB/s for SXM / PCIe / NVL.
    (("h100", "pcie"), "H100 PCIe", 756.5, 2000, "H100"),
    (("h100", "nvl"), "H100 NVL", 835.5, 3900, "H100"),
    (("h100",), "H100 SXM", 989.5, 3350, "H100"),
    # H200 data sheet (hpc-datasheet-sc23-h200): 1,979 (SXM) / 1,671 (NVL) TFLOPS with sparsity,
    # 4.8 TB/s.
    (("h200", "nvl"), "H200 NVL", 835.5, 4800, "H200"),
    (("h200",), "H200 SXM", 989.5, 4800, "H200"),
    # HGX B200 data sheet: 36 PFLOPS bf16 with sparsity over eight GPUs; DGX B200: 64 TB/s over
    # eight.
    (("b200",), "B200", 2250, 8000, "HGX/DGX B200"),
    # RTX PRO 6000 Blackwell data sheet: 1,792 GB/s and 4,000 TOPS of sparse FP4, which is eight
    # times dense bf16 (503.8 TFLOPS in the RTX Blackwell PRO white paper).
    (("rtx pro 6000", "blackwell"), "RTX PRO 6000 Blackwell", 503.8, 1792, "RTX PRO 6000"),
    # RTX A6000 data sheet: 309.7 TFLOPS with sparsity, 768 GB/s.
    (("rtx a6000",), "RTX A6000", 154.8, 768, "RTX A6000"),
    # L40S data sheet: 362.05 TFLOPS dense, 864 GB/s.
    (("l40s",), "L40S", 362.05, 864, "L40S"),
    # Ada GPU architecture white paper, RTX 4090: 165.2 TFLOPS bf16 with fp32 accumulate,
    # 1,008 GB/s.
    (("rtx 4090",), "RTX 4090", 165.2, 1008, "Ada white paper"),
)


def known_device(name: str) -> DeviceSpec | None:
    """The data sheet's spec of a `torch.cuda.get_device_name()`; None if it is not in the table."""
    words = name.lower()
    for needed, model, tflops, gb_per_s, source in _KNOWN:
        if all(word in words for word in needed):
            return DeviceSpec(
                model, tflops * 1e12, gb_per_s * 1e9, f"nvidia.com data sheet {source}"
            )
    return None


def device_spec(device: torch.device | str, dtype: torch.dtype | None = None) -> DeviceSpec:
    """The spec of a device: from the table if it has this GPU, else measured."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        spec = known_device(torch.cuda.get_device_name(device))
        if spec is not None:
            return spec
    return measure_device(device, dtype)


def measure_device(
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    copy_bytes: int | None = None,
    matmul_size: int | None = None,
) -> DeviceSpec:
    """Measure bandwidth by a copy and FLOP/s by a square matmul, the best of seven each.

    Args:
        device: a CUDA device or a CPU.
        dtype: of the matmul; default: bf16, on a CPU fp32.
        copy_bytes: size of the buffer that is copied; must not fit into a cache.
        matmul_size: rows of the square matrices.
    """
    import torch

    device = torch.device(device)
    on_cpu = device.type == "cpu"
    dtype = dtype or (torch.float32 if on_cpu else torch.bfloat16)
    if copy_bytes is None:
        # The KV cache has been allocated and has most of the memory.
        copy_bytes = 256 << 20 if on_cpu else min(1 << 30, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best_seconds(lambda: target.copy_(source), device)
    size = matmul_size or (1024 if on_cpu else 8192)
    a = torch.ones(size, size, dtype=dtype, device=device)
    b = torch.ones(size, size, dtype=dtype, device=device)
    matmul_s = _best_seconds(lambda: torch.matmul(a, b), device)
    name = "cpu" if on_cpu else torch.cuda.get_device_name(device)
    # a copy reads and writes every byte
    return DeviceSpec(name, 2 * size**3 / matmul_s, 2 * source.numel() / copy_s, "measured")


def _best_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    import torch

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()  # the first pass includes allocation and the choice of a kernel
    return max(min(once() for _ in range(repeats)), 1e-9)
