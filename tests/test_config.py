# SPDX-License-Identifier: Apache-2.0
"""The keys of method "bastion": what is accepted, what it becomes, and each refusal's sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils.argparse_utils import FlexibleArgumentParser

from helpers import engine_config, is_one_sentence, is_refused, write_checkpoint
from vllm_bastion import config
from vllm_bastion.config import BastionSpeculativeConfig
from vllm_bastion.hooks.requests import check_budget, process_inputs
from vllm_bastion.platform import current_host
from vllm_bastion.validate import BastionConfigError, arguments, engine, models

# --- accepted ---------------------------------------------------------------------------------


def test_the_engine_gets_a_dflash_configuration_with_our_settings(pair: tuple[str, str]) -> None:
    engine = engine_config(pair, bastion_budget=24, bastion_top_k=4)
    spec = engine.speculative_config
    assert type(spec) is BastionSpeculativeConfig
    assert (spec.method, spec.num_speculative_tokens, spec.bastion_gamma) == ("dflash", 32, 7)
    assert (spec.bastion_budget, spec.bastion_top_k) == (24, 4)
    assert spec.max_num_new_slots_for_drafting == 0
    assert engine.num_lookahead_tokens == 8
    assert engine.uniform_decode_query_len == 33
    assert engine.use_v2_model_runner
    assert len(repr(spec)) < 300


def send(vllm_config: VllmConfig, extra_args: dict[str, Any] | None) -> SamplingParams:
    """Parameters of a request that the front end has accepted."""
    params = SamplingParams(extra_args=extra_args)
    made = SimpleNamespace(sampling_params=params, prompt_token_ids=[1])
    process_inputs(lambda _: made, SimpleNamespace(vllm_config=vllm_config))
    return params


@pytest.mark.parametrize("budget", [-1, 33, 2.0, True, "8", [1]])
def test_a_request_with_a_wrong_budget_is_refused(pair: tuple[str, str], budget: Any) -> None:
    with pytest.raises(VLLMValidationError, match='"bastion_budget" in extra_args') as refused:
        send(engine_config(pair), {"bastion_budget": budget})
    is_one_sentence(str(refused.value), "from 0, plain decoding, to 32", repr(budget))


def test_a_requests_own_budget_is_read_by_this_method_only(pair: tuple[str, str]) -> None:
    engine = engine_config(pair)
    for given in (None, {}, {"other": "x"}, {"bastion_budget": 0}, {"bastion_budget": 32}):
        expected = (given or {}).get("bastion_budget", 32)
        assert config.request_budget(send(engine, given), 32) == expected
    plain: Any = SimpleNamespace(speculative_config=None)
    send(plain, {"bastion_budget": "many"})


COMMAND_LINES = {
    "json": ["--speculative-config", '{"method":"bastion","model":"D","num_speculative_tokens":9}'],
    "short": ["-sc", '{"method":"bastion","model":"D","num_speculative_tokens":9}'],
    "hyphens": ["-sc", '{"method":"bastion","model":"D","num-speculative-tokens":9}'],
    "dotted": [
        "--speculative-config.method=bastion",
        "--speculative-config.model=D",
        "--speculative-config.num_speculative_tokens=9",
    ],
    "flags": ["--spec-method", "bastion", "--spec-model", "D", "--spec-tokens", "9"],
    "mixed": ["--spec-method", "bastion", "-sc", '{"model":"D","num_speculative_tokens":9}'],
}


@pytest.mark.parametrize("form", COMMAND_LINES)
def test_every_form_of_the_command_line_arrives(form: str, pair: tuple[str, str]) -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = [word.replace("D", pair[1]) for word in COMMAND_LINES[form]]
    limits = [
        "--load-format", "dummy", "--max-num-batched-tokens", "128", "--max-model-len", "256",
        "--enforce-eager",
    ]  # fmt: skip
    parsed = parser.parse_args(["--model", pair[0], *limits, *words])
    engine = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    spec = engine.speculative_config
    assert type(spec) is BastionSpeculativeConfig
    assert (spec.num_speculative_tokens, spec.bastion_gamma) == (9, 7)


def test_a_drafter_of_fewer_positions_than_the_target_is_resized(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    short = write_checkpoint(tmp_path / "short", "drafter", max_position_embeddings=64)
    spec = engine_config((pair[0], short)).speculative_config
    assert spec.draft_model_config.hf_config.max_position_embeddings == 256
    spec = engine_config(pair).speculative_config
    assert spec.draft_model_config.hf_config.max_position_embeddings == 1024


def test_a_drafter_that_cannot_be_resized_limits_the_engine_config(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    short = write_checkpoint(
        tmp_path / "yarn", "drafter", max_position_embeddings=128, rope_scaling=rope
    )
    if hasattr(VllmConfig, "_limit_max_model_len_to_draft"):
        # vLLM 0.33 shortens the engine's own, with a warning.
        assert engine_config((pair[0], short)).model_config.max_model_len == 128
    else:
        is_refused((pair[0], short), short, "max_model_len 256", "set max_model_len to 128")
    assert engine_config((pair[0], short), {"max_model_len": 128}).speculative_config is not None


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("rope", "trained"), [(_LLAMA3, 32768), ({"rope_type": "yarn"}, 65536)])
def test_scaled_rotations_reach_positions_beyond_32768(
    rope: dict[str, Any], trained: int, tmp_path: Path
) -> None:
    """What the drafter of a long context rotates by is what its checkpoint says."""
    scaled = rope | {"factor": 8.0, "original_max_position_embeddings": 8192}
    target = write_checkpoint(tmp_path / "target", max_position_embeddings=65536)
    drafter = write_checkpoint(
        tmp_path / "drafter", "drafter", max_position_embeddings=trained, rope_scaling=scaled
    )
    engine = engine_config((target, drafter), {"max_model_len": 40960})
    config = engine.speculative_config.draft_model_config.hf_config
    with set_current_vllm_config(engine):
        made = get_rope(
            config.head_dim, max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters, dtype=torch.float32,
        )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    positions = torch.tensor([5, 32767, 32768, 40959])
    angles = torch.outer(positions.float(), frequencies)
    expected = factor * torch.cat([angles.cos(), angles.sin()], 1)
    torch.testing.assert_close(made.cos_sin_cache[positions], expected)


# --- N left out ---------------------------------------------------------------------------------


def nodes_of(pair: tuple[str, str], limits: dict[str, int], **keys: Any) -> int:
    """N of an engine; `engine_config` would name one."""
    args = EngineArgs(
        model=pair[0], speculative_config={"method": "bastion", "model": pair[1]} | keys,
        max_num_seqs=2, enforce_eager=True, load_format="dummy", **limits,
    )  # fmt: skip
    return args.create_engine_config().speculative_config.num_speculative_tokens


@pytest.mark.parametrize(
    ("keys", "limit", "nodes"),
    [
        ({}, 512, "default"), ({"num_speculative_tokens": None}, 512, "default"),
        ({}, 48, 48 - 1 - 7), ({"bastion_top_k": 1}, 512, 7), ({"bastion_budget": 20}, 512, 20),
        ({"bastion_budget": 0}, 512, 1), ({"num_speculative_tokens": 9}, 48, 9),
    ],
)  # fmt: skip
def test_the_number_of_nodes_may_be_left_out(
    pair: tuple[str, str], keys: dict[str, Any], limit: int, nodes: Any
) -> None:
    expected = current_host().default_nodes if nodes == "default" else nodes
    limits = {"max_model_len": 256, "max_num_batched_tokens": limit}
    assert nodes_of(pair, limits, **keys) == expected


def test_a_tree_fits_into_the_models_length(pair: tuple[str, str]) -> None:
    limits = {"max_model_len": 40}
    assert nodes_of(pair, limits) == 40 - 1 - 7
    assert nodes_of(pair, limits, num_speculative_tokens=39) == 39
    with pytest.raises(BastionConfigError) as caught:
        nodes_of(pair, limits, num_speculative_tokens=40)
    is_one_sentence(str(caught.value), '"num_speculative_tokens": 40', "max_model_len 40", "39")


def test_a_limit_that_holds_no_tree_is_refused_without_a_number_of_nodes_too(
    pair: tuple[str, str],
) -> None:
    with pytest.raises(BastionConfigError, match="raise max_num_batched_tokens"):
        nodes_of(pair, {"max_model_len": 8, "max_num_batched_tokens": 8})


# --- refused: the user's keys -----------------------------------------------------------------

KEYS = {
    "unknown own key": ({"bastion_budgte": 3}, '"bastion_budgte"', 'mean "bastion_budget"'),
    "unknown key": ({"num_spec_tokens": 3}, '"num_spec_tokens"', '"num_speculative_tokens"'),
    "nothing like it": ({"zzz": 3}, '"zzz"', "known keys: bastion_budget"),
    "gamma is not a setting": ({"bastion_gamma": 7}, '"bastion_gamma"', "did you mean"),
    "bool is no number": ({"bastion_top_k": True}, '"bastion_top_k": True', "a valid integer"),
    "too small": ({"bastion_top_k": 0}, '"bastion_top_k": 0', "greater than or equal to 1"),
    "too large": ({"bastion_top_k": 33}, '"bastion_top_k": 33', "less than or equal to 32"),
    "fraction": ({"bastion_budget": 1.5}, '"bastion_budget": 1.5', "'adaptive' or a valid integer"),
    "over the nodes": ({"bastion_budget": 33}, '"bastion_budget": 33', "lower the first"),
    "latency": ({"bastion_latency_model": "x"}, '"bastion_latency_model"', "'ema_calib'"),
    "no model": ({"model": None}, 'needs "model"', "DFlash drafter"),
    "text nodes": ({"num_speculative_tokens": "8"}, '"num_speculative_tokens"', "a valid integer"),
    "sampled drafts": ({"draft_sample_method": "probabilistic"}, "draft_sample_method", "remove"),
    "FLy": ({"rejection_sample_method": "fly"}, "rejection_sample", "the target's own"),
    "vllm's own sizing": ({"enable_adaptive_verification": True}, "adaptive_verif", "remove"),
    **{
        f"{key} without effect": ({key: value}, f'"{key}"', "does not work with method")
        for key, value in {
            "prompt_lookup_max": 4, "enforce_eager": "yes", "suffix_decoding_max_tree_depth": 12,
            "parallel_drafting": True, "disable_padded_drafter_batch": True,
            "tensor_parallel_size": 1,
        }.items()
    },
    "by batch size": (
        {"num_speculative_tokens_per_batch_size": [(1, 8, 4)]},
        "num_speculative_tokens_per_batch_size",
        "remove",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_a_wrong_key_is_refused_in_one_sentence(case: str, pair: tuple[str, str]) -> None:
    keys, names, way_out = KEYS[case]
    is_refused(pair, names, way_out, **keys)


def test_the_drafter_is_split_as_the_target_is(pair: tuple[str, str]) -> None:
    assert engine_config(pair, draft_tensor_parallel_size=1) is not None
    is_refused(pair, '"draft_tensor_parallel_size": 2', "remove it", draft_tensor_parallel_size=2)


@pytest.mark.parametrize("key", ["bastion_buget", "bastionbudget", "bastion_top_k"])
def test_a_requests_misspelt_budget_is_refused(key: str) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        check_budget({key: 1}, most=32)
    is_one_sentence(str(refused.value), f'"{key}"', '"bastion_budget"')


# --- refused: target and engine ---------------------------------------------------------------


@pytest.mark.parametrize("nodes, limit, way_out", [(121, 128, "to 120 or"), (1, 8, "raise max")])
def test_more_nodes_than_a_batch_holds_are_refused(
    nodes: int, limit: int, way_out: str, pair: tuple[str, str]
) -> None:
    sizes = {"max_num_batched_tokens": limit, "max_num_seqs": 1}
    needed = f"at least {1 + nodes + 7}"
    said = is_refused(pair, needed, way_out, arguments=sizes, num_speculative_tokens=nodes)
    assert ("lower it" in said) == (nodes == 121)
    assert engine_config(pair, num_speculative_tokens=120) is not None  # exactly as many


ENGINES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "pipeline": ({"pipeline_parallel_size": 2}, ("only the last stage", "set it to 1")),
    "dcp": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        ("decode_context_parallel_size", "set it to 1"),
    ),
    "pcp": ({"prefill_context_parallel_size": 2}, ("prefill_context_parallel_size", "to 1")),
    "dbo": ({"enable_dbo": True}, ("enable_dbo", "remove")),
    "ubatches": ({"ubatch_size": 2}, ("ubatch_size", "remove")),
    "sharded": ({"enable_batch_sharded_sampling": True}, ("batch_sharded_sampling", "remove")),
    "watermark": ({"watermark_config": {}}, ("watermark_config", "remove")),
    "experts": ({"enable_return_routed_experts": True}, ("routed_experts", "remove")),
    "nvfp4 cache": ({"kv_cache_dtype": "nvfp4"}, ("kv_cache_dtype", 'use "auto" or "fp8"')),
    "sampling mask": ({"return_sampling_mask": True}, ("return_sampling_mask", "remove")),
}


@pytest.mark.parametrize("case", ENGINES)
def test_an_engine_option_in_the_way_is_refused(case: str, pair: tuple[str, str]) -> None:
    arguments, parts = ENGINES[case]
    is_refused(pair, *parts, arguments=arguments)


def test_adapters_need_sizes_that_the_host_knows(pair: tuple[str, str]) -> None:
    arguments = {"enable_lora": True, "max_lora_rank": 8}
    lagged = {"bastion_budget_timing": "lagged"}
    is_refused(pair, "bastion_budget_timing", 'set it to "auto"', arguments=arguments, **lagged)
    engine = engine_config(pair, arguments)
    assert engine.speculative_config.bastion_budget_timing == "exact"
    assert engine_config(pair).speculative_config.bastion_budget_timing == "auto"


def test_adapters_get_as_many_nodes_as_vllm_allows(pair: tuple[str, str]) -> None:
    """vLLM's defaults on an H100 have room for 7; N left out was 255, and refused."""
    for requests, rows, nodes in ((1024, 8192, 7), (8, 128, 15), (None, None, 7)):
        arguments = {"enable_lora": True, "max_num_seqs": requests, "max_num_batched_tokens": rows}
        engine = engine_config(pair, arguments, num_speculative_tokens=None)
        assert engine.speculative_config.num_speculative_tokens == nodes
    arguments |= {"max_num_seqs": 8, "max_num_batched_tokens": 9}  # not one node each
    with pytest.raises(ValueError):
        engine_config(pair, arguments, num_speculative_tokens=None)


def test_a_drafter_in_fp8_needs_a_gpu(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it ended in vLLM's traceback, without a sentence of ours."""
    is_refused(pair, '"quantization": "fp8"', "int8 already", "remove it", quantization="fp8")
    monkeypatch.setattr(type(current_host()), "serves_float8_products", True)
    arguments.check_options(EngineArgs(model=pair[0]), {"quantization": "fp8"})


def test_the_v1_runner_is_refused(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    is_refused(pair, "Model Runner V2", "unset VLLM_USE_V2_MODEL_RUNNER")


def test_a_connector_that_saves_layer_by_layer_is_refused(pair: tuple[str, str]) -> None:
    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    given = {"kv_transfer_config": connector}
    is_refused(pair, "ExampleConnector", "kv_transfer_config", "or remove it", arguments=given)
    connector = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert engine_config(pair, {"kv_transfer_config": connector}) is not None


def _target(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "model": "some/target", "runner_type": "generate", "is_encoder_decoder": False,
        "is_diffusion": False, "is_attention_free": False, "is_hybrid": False,
        "architecture": "SomeForCausalLM", "use_mla": False, "attention_chunk_size": None,
        "rswa_window": None, "uses_alibi": False, "is_mm_prefix_lm": False,
        "hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding_attention"]),
        "hf_config": SimpleNamespace(architectures=["SomeForCausalLM"]),
    }  # fmt: skip
    return SimpleNamespace(**(plain | changes))


HYBRID = SimpleNamespace(layer_types=["full_attention", "linear_attention"])
CHUNKED = SimpleNamespace(layer_types=["chunked_attention", "full_attention"])
TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "pooling": ({"runner_type": "pooling"}, "pooling"),
    "encoder-decoder": ({"is_encoder_decoder": True}, "encoder-decoder"),
    "diffusion": ({"is_diffusion": True}, "diffusion"),
    "mamba": ({"is_attention_free": True}, "recurrent"),
    "hybrid": ({"is_hybrid": True}, "recurrent"),
    "other hybrid": (
        {"is_hybrid": True, "hf_text_config": HYBRID, "architecture": "KimiLinearForCausalLM"},
        "recurrent layers in a KimiLinearForCausalLM",
    ),
    "sparse": ({"architecture": "MiniMaxM3SparseForCausalLM"}, "rows that a learned index chooses"),
    "sparse hybrid": (
        {"is_hybrid": True, "hf_text_config": HYBRID, "architecture": "Qwen4ExpForCausalLM"},
        "is a Qwen4ExpForCausalLM, which attends",
    ),
    "mla": ({"use_mla": True}, "latent attention"),
    "chunked": ({"attention_chunk_size": 8192}, "chunked local"),
    "mixed chunked": ({"hf_text_config": CHUNKED}, "chunked local"),
    "rswa": ({"rswa_window": 128}, "R-SWA"),
    "alibi": ({"uses_alibi": True}, "ALiBi"),
    "prefix lm": ({"is_mm_prefix_lm": True}, "image tokens"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_that_trees_cannot_be_verified_on_is_refused(case: str) -> None:
    changes, names = TARGETS[case]
    models.check_target(_target())
    with pytest.raises(BastionConfigError) as caught:
        models.check_target(_target(**changes))
    is_one_sentence(str(caught.value), '"some/target"', names, "drop speculative_config")


def test_gated_delta_networks_are_served_on_cpu_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    target = _target(is_hybrid=True, hf_text_config=HYBRID, architecture="Qwen3NextForCausalLM")
    for kind in ("cpu", "cuda", "rocm"):
        platform = SimpleNamespace(
            is_cpu=lambda k=kind: k == "cpu", is_cuda=lambda k=kind: k == "cuda"
        )
        monkeypatch.setattr(vllm.platforms, "_current_platform", platform, raising=False)
        if kind != "rocm":
            models.check_target(target)
    with pytest.raises(BastionConfigError) as caught:
        models.check_target(target)
    is_one_sentence(str(caught.value), "gated delta networks", "NVIDIA GPUs only")


def test_the_attributes_read_of_a_target_exist(pair: tuple[str, str]) -> None:
    model = EngineArgs(model=pair[0], max_model_len=256).create_model_config()
    assert all(hasattr(model, name) for name in vars(_target()))
    models.check_target(model)


LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "alibi": ({"impl": SimpleNamespace(alibi_slopes=[0.5])}, "ALiBi"),
    "encoder": ({"attn_type": "encoder_only"}, "type encoder_only"),
    "scales by head": ({"_k_scale": torch.ones(2)}, "scales its KV cache head by head"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_the_kernels_do_not_implement_is_refused(case: str) -> None:
    changes, names = LAYERS[case]
    plain: dict[str, Any] = {"impl": SimpleNamespace(alibi_slopes=None), "attn_type": "decoder"}
    engine.check_layers({"layers.0.attn": SimpleNamespace(**plain)})
    with pytest.raises(BastionConfigError) as caught:
        engine.check_layers({"layers.7.attn": SimpleNamespace(**(plain | changes))})
    is_one_sentence(str(caught.value), "layers.7.attn", names)


def test_a_cache_that_no_tree_backend_reads_is_refused() -> None:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    with pytest.raises(ValueError) as caught:
        current_host().tree_backend(TritonAttentionBackend)
    is_one_sentence(str(caught.value), "TRITON_ATTN", "backend unset", 'kv_cache_dtype to "auto"')


@pytest.mark.parametrize(
    ("cuda", "given", "expected"),
    [(True, None, "FLASH_ATTN"), (True, "TRITON_ATTN", "TRITON_ATTN"), (False, None, None)],
)
def test_a_gpu_uses_flash_attention_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, given: str | None, expected: str | None
) -> None:
    import vllm.platforms
    from vllm.config import AttentionConfig

    from vllm_bastion.hooks.engine_args import use_own_classes

    platform = SimpleNamespace(is_cuda=lambda: cuda, is_cpu=lambda: not cuda)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    worker = "gpu_worker.Worker" if cuda else "cpu_worker.CPUWorker"
    engine = SimpleNamespace(
        attention_config=AttentionConfig(backend=given),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=cuda),
        parallel_config=SimpleNamespace(worker_cls=f"vllm.v1.worker.{worker}"),
    )
    use_own_classes(engine)
    backend = engine.attention_config.backend
    assert (backend.name if backend else None) == expected
