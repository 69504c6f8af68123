# SPDX-License-Identifier: Apache-2.0
"""What the CPU code relies on."""

from __future__ import annotations

from tests.contract.reliance import Reliance

_GPU = "vllm.v1.worker.gpu"
_MODELS = "vllm.model_executor.models"

CPU: tuple[Reliance, ...] = (
    Reliance(
        f"{_MODELS}.qwen3_dflash:DFlashQwen3Model",
        files="cpu/context_kv.py",
        methods=(
            "_normalize_context_k(self, all_k)",
            (
                "_project_context_kv(self, context_states, num_ctx, num_layers, num_kv_heads, "
                "head_dim)"
            ),
        ),
        names=(
            "_fused_kv_bias _fused_kv_weight _hidden_norm_weight _k_norm_weights "
            "_rms_norm_eps _rope_cos_sin_cache"
        ),
    ),
    Reliance(
        "vllm._custom_ops",
        files="cpu/int8.py",
        names=(
            "_supports_onednn cpu_attn_reshape_and_cache create_onednn_scaled_mm "
            "onednn_scaled_int8_quant onednn_scaled_mm rms_norm"
        ),
    ),
    Reliance(
        "vllm._custom_ops:cpu_attention_with_kv_cache",
        files="cpu/attention.py",
        why="plain rows call the op in place of the backend, with arguments in this order",
        body=(
            "query: torch.Tensor,",
            "key_cache: torch.Tensor,",
            "value_cache: torch.Tensor,",
            "output: torch.Tensor,",
            "query_start_loc: torch.Tensor,",
            "seq_lens: torch.Tensor,",
            "scale: float,",
            "causal: bool,",
            "alibi_slopes: torch.Tensor | None,",
            "sliding_window: int,",
            "block_table: torch.Tensor,",
            "softcap: float,",
            "scheduler_metadata: torch.Tensor,",
            "s_aux: torch.Tensor | None,",
            "dynamic_causal: torch.Tensor | None = None,",
            "k_scale: float = 1.0,",
            "v_scale: float = 1.0,",
            'kv_cache_dtype: str = "auto",',
        ),
    ),
    Reliance(
        "vllm.model_executor.layers.attention.attention:Attention.forward",
        files="cpu/attention.py",
        why="a backend that says so writes the cache itself",
        body=("not self.attn_backend.forward_includes_kv_cache_update",),
    ),
    Reliance("vllm._custom_ops", files="cpu/linear.py", names="_supports_onednn create_onednn_mm"),
    Reliance(
        "vllm._custom_ops:onednn_mm",
        files="cpu/linear.py",
        why="a head calls the op itself, with room for its result",
        body=("output, x.reshape(-1, dnnl_handler.k), bias, dnnl_handler.handler_tensor",),
    ),
    Reliance(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        files="cpu/linear.py",
        why="a head takes oneDNN where vLLM does: unless this check holds",
        body=("check_cpu_sgl_kernel(N, K, dtype)",),
    ),
    Reliance(
        "torch._dynamo.aot_compile:AOTCompiledFunction",
        files="cpu/stored_graphs.py",
        names=("_artifacts"),
    ),
    Reliance(
        "vllm.compilation.decorators:_try_load_aot_compiled_fn",
        files="cpu/stored_graphs.py",
        why="a loaded function must have this method",
        body=("._artifacts.compiled_fn.finalize_loading(",),
    ),
    Reliance(
        f"{_GPU}.buffer_utils:UvaBackedTensor",
        files="cpu/twins/__init__.py",
        methods=("copy_to_uva(self, n)",),
        names="cpu gpu",
    ),
    Reliance("torch.cpu", files="cpu/int8.py", names="_is_vnni_supported"),
    Reliance("torch.cpu", files="cpu/linear.py", names="_is_amx_tile_supported"),
)
