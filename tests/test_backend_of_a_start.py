# SPDX-License-Identifier: Apache-2.0
"""What vLLM's attention backend refuses on a GPU is one sentence, of `check` and of a start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from helpers import is_one_sentence
from vllm_bastion.checks import BastionConfigError
from vllm_bastion.checks.engine import check_backend

_FLASH = {80: 2, 86: 2, 89: 2, 90: 3, 100: 4, 120: 2}  # versions of FlashAttention that vLLM takes


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `check_backend` as on a GPU of some capability. vLLM's CPU build has no FlashAttention,
    so what it asks about its version is answered here."""

    def check(capability: int, **model: Any) -> None:
        version = _FLASH[capability]

        def supports_fp8(dtype: str = "fp8_e4m3", **rest: Any) -> bool:
            return capability in (90, 100) and dtype != "fp8_e5m2"

        answers = {
            "is_flash_attn_varlen_func_available": lambda: True,
            "flash_attn_supports_sinks": lambda: version in (3, 4),
            "flash_attn_supports_kv_cache_dtype": supports_fp8,
            "is_fa_version_supported": lambda asked: asked == 4 and capability in (90, 100),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(flash_attn, name, answer, raising=False)
        major, minor = divmod(capability, 10)
        monkeypatch.setattr(
            type(current_platform), "get_device_capability",
            classmethod(lambda cls, device_id=0: DeviceCapability(major, minor)),
        )  # fmt: skip
        monkeypatch.setattr(
            "vllm.config.set_current_vllm_config", lambda config: torch.inference_mode()
        )
        check_backend(config_of(**model))

    return check


def config_of(
    architecture: str = "Qwen3ForCausalLM",
    cache: str = "auto",
    head: int = 128,
    backend: AttentionBackendEnum | None = AttentionBackendEnum.FLASH_ATTN,
    **text: Any,
) -> Any:
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend),
        model_config=SimpleNamespace(
            architecture=architecture, dtype=torch.bfloat16, use_mla=False,
            hf_text_config=SimpleNamespace(**text), get_head_size=lambda: head,
        ),
        cache_config=SimpleNamespace(cache_dtype=cache, user_specified_block_size=False),
    )  # fmt: skip


@pytest.mark.parametrize("capability", _FLASH)
def test_a_dense_target_is_served_on_every_gpu(on_gpu: Any, capability: int) -> None:
    on_gpu(capability)
    on_gpu(capability, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize(
    "asked",
    [
        {"architecture": "GptOssForCausalLM"},
        {"architecture": "MiMoV2FlashForCausalLM", "add_swa_attention_sink_bias": True},
        {"cache": "fp8"},
        {"global_head_dim": 512, "head": 256},
    ],
)
@pytest.mark.parametrize("capability", _FLASH)
def test_sinks_fp8_caches_and_large_heads_need_a_newer_gpu(
    on_gpu: Any, capability: int, asked: dict[str, Any]
) -> None:
    if capability in (90, 100):
        on_gpu(capability, **asked)
        return
    with pytest.raises(BastionConfigError, match="FLASH_ATTN") as refused:
        on_gpu(capability, **asked)
    is_one_sentence(str(refused.value))
    assert ('kv_cache_dtype to "auto"' in str(refused.value)) == ("cache" in asked)


def test_another_backend_is_refused_before_the_worker_starts(on_gpu: Any) -> None:
    with pytest.raises(BastionConfigError, match="no tree attention for the backend TRITON_ATTN"):
        on_gpu(90, backend=AttentionBackendEnum.TRITON_ATTN)


def test_a_host_without_a_gpu_is_not_asked() -> None:
    check_backend(config_of(backend=None))
