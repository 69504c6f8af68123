# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by test files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

_TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": None,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
_DRAFTER: dict[str, Any] = _TARGET | {
    "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"], "tie_word_embeddings": False,
    "block_size": 8, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]},
}  # fmt: skip


def write_checkpoint(folder: Path, base: str = "target", **changes: Any) -> str:
    """Write the config of a small target or drafter (gamma 7), without weights; its folder.

    changes: keys to replace; None removes a key.
    """
    content = (_TARGET if base == "target" else _DRAFTER) | changes
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine_config(
    pair: tuple[str, str], arguments: dict[str, Any] | None = None, **keys: Any
) -> Any:
    """The configuration of an engine with method "bastion".

    arguments: further ones of `EngineArgs`; keys: further ones of `speculative_config`.
    """
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "bastion", "model": pair[1], "num_speculative_tokens": 32} | keys
    limits: dict[str, Any] = {
        "max_model_len": 256, "max_num_batched_tokens": 128, "max_num_seqs": 2,
        "enforce_eager": True, "load_format": "dummy",
    }  # fmt: skip
    args = EngineArgs(model=pair[0], speculative_config=given, **(limits | (arguments or {})))
    return args.create_engine_config()


def inspect_models_here() -> None:
    """Let vLLM inspect model classes in this process.

    By default it starts a process for each class that imports vLLM, to avoid initialising CUDA.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def is_one_sentence(message: str, *parts: str) -> None:
    """Assert that a refusal is one sentence that contains all `parts`."""
    for part in parts:
        assert part in message
    assert "\n" not in message and ". " not in message and len(message) < 400


def is_refused(
    pair: tuple[str, str], *parts: str, arguments: dict[str, Any] | None = None, **keys: Any
) -> str:
    """Assert that `engine_config` refuses, in one sentence that contains all `parts`."""
    from vllm_bastion.validate import BastionConfigError

    with pytest.raises(BastionConfigError) as caught:
        engine_config(pair, arguments, **keys)
    is_one_sentence(str(caught.value), *parts)
    return str(caught.value)


def run_python(
    code: str, cwd: Path | None = None, **env: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter; an environment value None removes the variable."""
    environment = os.environ | {name: value for name, value in env.items() if value is not None}
    for name, value in env.items():
        if value is None:
            environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=800, check=False,
    )  # fmt: skip


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A tmpfs of one page; skips the test where none may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=755", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
