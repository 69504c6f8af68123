# SPDX-License-Identifier: Apache-2.0
"""Methods by the words that name them, and their engines.

    plain                           vLLM without speculation
    dflash 7                        vLLM's chain of the drafter; without a number as deep as it is
    dflash 7 adaptive               the same with vLLM's adaptive verification (CUDA)
    eagle3 5, ngram 8, suffix 32    vLLM's other methods
    bastion                         as a user has it
    bastion budget=16 lookup=false  with keys, without their `bastion_`; `nodes=N` is
                                    `num_speculative_tokens`

`drafter=NAME` takes another drafter: a folder of the pair, a checkpoint, or `random`, which has the
own drafter's shape and is never right. vLLM's methods run in the model runner that vLLM chooses, on
a CPU host V1; `plain v2` is plain decoding in Model Runner V2, whose seeded draws are bastion's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from transformers import PretrainedConfig

from bastion_kernels.cpu.cache import root as cache_dir
from benchmarks.harness.engine import Engine
from benchmarks.prompts import DataError
from benchmarks.random_drafter import write_random
from vllm_bastion.checkpoints.drafter_types import architectures_of, drafter_type_of, gamma_of

PLAIN, REFERENCE = "plain", "plain v2"
ESTIMATORS = ("static", "ema", "ema_calib")
# Memory of an engine besides its KV cache: its weights in the layouts of their kernels too, and
# libraries and compiled code.
_WEIGHTS, _OVERHEAD_BYTES = 2.2, 3 << 28
# Of a GPU's memory for all engines together, and slots of a request beyond its context: nodes,
# drafted positions and a block that is not full.
_GPU_SHARE, _SLOTS = 0.9, 512
ENVIRONMENT = {
    # Steps are counted in the engine's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Target:
    """What is evaluated: names on the Hub, or folders."""

    target: str
    drafter: str | None = None
    eagle3: str | None = None


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    Args:
        name: the words that name it; "@ NAME" is added for another checkout.
        speculative: vLLM's `speculative_config`; None for plain decoding.
        checkout: the folder of another checkout, whose package the engine runs.
        label: what the tables call that checkout.
    """

    name: str
    speculative: dict[str, Any] | None = None
    checkout: Path | None = None
    label: str = ""

    @property
    def ours(self) -> bool:
        return (self.speculative or {}).get("method") == "bastion"

    def elsewhere(self, checkout: Path, label: str) -> Method:
        return replace(self, name=f"{self.name} @ {label}", checkout=checkout, label=label)

    def engine(self, target: str, *, cpu: bool, **settings: Any) -> Engine:
        """settings: fields of `Engine`."""
        environment = dict(ENVIRONMENT)
        if self.name == REFERENCE:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        elif not self.ours:
            environment["VLLM_PLUGINS"] = ""
        if cpu:
            # In GiB; by default an engine takes half of the memory.
            gib = _cache_gib(settings.get("max_model_len", 0))
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(gib)
        if self.checkout is not None:
            # What another checkout measured or compiled is not this one's.
            cache = cache_dir() / "against" / self.label
            environment["VLLM_BASTION_CACHE"] = str(cache)
            environment["VLLM_CACHE_ROOT"] = str(cache / "vllm")
        return Engine(
            self.speculative, Path(target), environment=environment, checkout=self.checkout,
            **settings,
        )  # fmt: skip


def method_of(words: str, what: Target) -> Method:
    """The method that words name. Raises DataError: no such method, or it lacks a drafter."""
    if words in (PLAIN, REFERENCE):
        return Method(words)
    first, *rest = words.split()
    flags = [word for word in rest if "=" not in word and not word.isdecimal()]
    keys = dict(word.split("=", 1) for word in rest if "=" in word)
    number = next((int(word) for word in rest if word.isdecimal()), None)
    if unknown := [flag for flag in flags if flag != "adaptive"]:
        raise DataError(f"no method {words!r}: what is {unknown[0]!r}?")
    if first == "ngram":
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        return Method(words, {"method": first, "num_speculative_tokens": number or 8, **lookup})
    if first == "suffix":
        return Method(words, {"method": first, "num_speculative_tokens": number or 32})
    drafter = what.eagle3 if first == "eagle3" else what.drafter
    drafter = _drafter(keys.pop("drafter"), drafter) if "drafter" in keys else drafter
    if drafter is None or first not in ("dflash", "eagle3", "bastion"):
        known = "plain, dflash N, eagle3 N, ngram, suffix, bastion KEY=VALUE"
        raise DataError(f"no method {words!r} without a drafter; there are: {known}")
    own: dict[str, Any] = {"method": first, "model": drafter}
    if first == "eagle3":
        return Method(words, own | {"num_speculative_tokens": number or 5})
    if first == "dflash":
        gamma, own["method"] = drafts_of(drafter)
        own["num_speculative_tokens"] = number or gamma
        if "adaptive" in flags:
            own["enable_adaptive_verification"] = True
        return Method(words, own)
    for key, value in keys.items():
        name = "num_speculative_tokens" if key == "nodes" else f"bastion_{key}"
        own[name] = _value(value)
    return Method(words, own)


def paper_methods(what: Target, *, cpu: bool) -> list[str]:
    """The rows of the paper's tables: chains, fixed budgets, its estimators, and lookup."""
    rows = [PLAIN]
    if what.eagle3 is not None:
        rows += [f"eagle3 {n}" for n in (3, 5, 7)]
    if what.drafter is not None:
        gamma, _ = drafts_of(what.drafter)
        lengths = (4, 7, 15) if gamma >= 15 else (2, 3, 5, gamma)
        rows += [f"dflash {n}" for n in lengths]
        rows += [] if cpu else [f"dflash {n} adaptive" for n in lengths]
        rows.append(f"bastion nodes={gamma} budget={gamma} top_k=1 lookup=false")
        budgets, most = ((16, 32, 63), 63) if cpu else ((16, 32, 64, 128, 255), 255)
        rows += [f"bastion nodes={n} budget={n} lookup=false" for n in budgets]
        rows += [f"bastion nodes={most} latency_model={e} lookup=false" for e in ESTIMATORS]
        rows += [f"bastion nodes={most} lookup=false", f"bastion nodes={most} lookup=true"]
    return [*rows, "ngram", "suffix"]


def _drafter(name: str, own: str | None) -> str:
    if own is None or Path(name).is_dir():
        return name
    if name == "random":
        return str(write_random(Path(own), cache_dir() / "random" / Path(own).parent.name))
    beside = Path(own).with_name(name)
    return str(beside) if beside.is_dir() else name


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def drafts_of(drafter: str) -> tuple[int, str]:
    """A drafter's depth, and vLLM's method for its chain. Raises DataError: it is no such one."""
    config = argparse.Namespace(**config_of(drafter))
    kind, gamma = drafter_type_of(architectures_of(config)), gamma_of(config)
    if kind is None or gamma is None:
        raise DataError(f"{Path(drafter).name} has no drafter that method bastion supports")
    return gamma, kind.method


def config_of(name: str) -> dict[str, Any]:
    """A checkpoint's config, of a folder or of the Hub. Raises DataError: it cannot be had."""
    try:
        config, _ = PretrainedConfig.get_config_dict(name)
    except OSError as error:
        raise DataError(f"no model {name}: no such folder, and the Hub does not give it") from error
    return {"architectures": None, **config}


def groups(names: Sequence[str], alive: int) -> list[list[str]]:
    """Split names into groups of engines that live side by side, plain decoding in each.

    A method stays with itself in another checkout, even where that is one engine too many. With one
    engine at a time, each is a group of its own, and plain decoding is the first.
    """
    if alive < 2:
        return [[PLAIN], *([name] for name in names if name != PLAIN)]
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(name.partition(" @ ")[0], []).append(name)
    found = [units.pop(PLAIN)]
    for own in units.values():
        if len(found[-1]) > 1 and len(found[-1]) + len(own) > alive:
            found.append([PLAIN])
        found[-1] += own
    return found


def reference_of(method: Method, temperature: float, ran: Sequence[str]) -> str | None:
    """Which method's tokens this one must emit, or None where only the distribution is kept."""
    if temperature == 0:
        return None if method.name == PLAIN else PLAIN
    if not method.ours:
        return None
    return REFERENCE if REFERENCE in ran else PLAIN


def gpu_share(what: Target, alive: int, concurrency: int, max_model_len: int) -> dict[str, Any]:
    """The memory of a GPU that one of `alive` engines gets, as fields of `Engine`.

    Each gets a KV cache of the size it needs, in two-byte numbers: vLLM would measure what is free,
    which changes while others start. Raises DataError: a config does not say how large that is.
    """
    total = 0
    for name in (what.target, what.drafter):
        if name is not None:
            config = config_of(name)
            try:
                heads = config["num_attention_heads"]
                size = config.get("head_dim") or config["hidden_size"] // heads
                kv_heads = config.get("num_key_value_heads") or heads
                total += 4 * config["num_hidden_layers"] * kv_heads * size
            except KeyError as error:
                what_for = "does not say how large its KV cache is: use --alive 1"
                raise DataError(f"the config of {Path(name).name} {what_for}") from error
    tokens = concurrency * (max_model_len + _SLOTS)
    return {"memory": _GPU_SHARE / alive, "kv_cache_bytes": total * tokens}


def _cache_gib(max_model_len: int) -> int:
    """1 GiB, and one more for every 8192 tokens: Qwen3-0.6B with its drafter needs 0.13 MB each."""
    return 1 + max_model_len // 8192


def fitting(what: Target, max_model_len: int) -> int:
    """How many engines of a target in local folders fit into the free memory, at least two."""
    folders = [one for one in (what.target, what.drafter) if one is not None]
    files = [path for one in folders for path in Path(one).glob("*.safetensors")]
    weights = sum(path.stat().st_size for path in files)
    each = _WEIGHTS * weights + _OVERHEAD_BYTES + (_cache_gib(max_model_len) << 30)
    return max(2, int(0.9 * psutil.virtual_memory().available / each))
