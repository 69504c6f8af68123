# SPDX-License-Identifier: Apache-2.0
"""What is rehearsed: an engine per row of the table, and what it may do in a steady step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.e2e.methods import Target, method_of
from tests.e2e.adapters import RANK
from vllm_bastion.scheduler.gate import Arm

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "benchmarks" / "tiny"

PROMPTS = ("def add(a, b):\n    return", "12 + 7 = ", "User: Hello")


@dataclass(frozen=True)
class Case:
    """An engine that decodes `PROMPTS` greedily.

    Args:
        name: for the command line.
        title: for the table.
        speculative: keys of `speculative_config`; None for plain decoding.
        plain: the case whose tokens it must repeat; its own name for plain decoding.
        weights: "varied" for other weights from the start, "reload" or "transfer" for other weights
            in the running engine; "sleep" for the same ones after sleep at level 1, "refill" for
            other ones after sleep at level 2; see `new_weights`.
        like_fresh: whether it also takes as many steps as the case `plain`.
        unlike: prompts whose tokens must not be those of the case "plain"; all others must be.
        adapters: whether the first two prompts have a LoRA adapter each.
        long: tokens of prompts that are repeated up to this length, and continued in a second turn
            with as many cached tokens as the case `plain` has; 0 for short prompts and one turn.
        joins: tokens of a prompt that joins a request that decodes.
        arm: what every step ends with; None for the choice of the gate.
        waits: times per steady step that this plugin may wait for the device, on average.
        blocks: calls per steady step that may block or allocate, on average.
        arguments: further arguments of `EngineArgs`.
    """

    name: str
    title: str
    speculative: dict[str, Any] | None = None
    plain: str = "plain"
    pair: Path = TINY
    waits: float = 0.0
    blocks: float = 0.0
    tokens: int = 24
    arguments: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    like_fresh: bool = False
    unlike: tuple[int, ...] | None = None
    adapters: bool = False
    long: int = 0
    joins: int = 40
    arm: Arm | None = None

    @property
    def takes_prompts(self) -> bool:
        """Whether its graphs take steps with prompts: those of trees do, except a hybrid's."""
        method = (self.speculative or {}).get("method")
        return method == "bastion" and self.plain not in ("plain-hybrid", "plain-cached")

    def engine_arguments(self) -> dict[str, Any]:
        speculative = self.speculative
        if speculative is not None:
            speculative = {"model": str(self.pair / "drafter"), **speculative}
        return {
            "model": str(self.pair / "target"),
            "speculative_config": speculative,
            # Triton's interpreter multiplies matrices wrongly in bfloat16.
            "dtype": "float16",
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "gpu_memory_utilization": 0.02,
            "async_scheduling": True,
            "disable_log_stats": False,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            **self.arguments,
        }


def _bastion(
    nodes: int, budget: int | str, model: Path | None = None, **keys: Any
) -> dict[str, Any]:
    given = {} if model is None else {"model": str(model)}
    own = {f"bastion_{name}": value for name, value in keys.items()}
    sizes = {"num_speculative_tokens": nodes, "bastion_budget": budget}
    return {"method": "bastion", **sizes, **given, **own}


def _paper(method: str) -> dict[str, Any]:
    """A case of an engine as `benchmarks.e2e` starts it on a GPU, with room for 512 rows."""
    what = Target(str(TINY / "target"), str(TINY / "drafter"))
    words = method if method == "plain" else f"bastion {method} lookup=false"
    engine = method_of(words, what).engine(
        what.target,
        cpu=False,
        max_num_seqs=1,
        max_model_len=512,
        max_num_batched_tokens=512,
        dtype="float16",
        cudagraphs="FULL",
    )
    arguments = engine.arguments()
    arguments["compilation_config"]["mode"] = 0
    del arguments["model"]
    speculative = arguments.pop("speculative_config")
    return {"speculative": speculative, "plain": "paper-plain", "arguments": arguments}


# A GPU's default. vLLM breaks the graphs at attention while it captures, because there is no
# compiler here. The prompt exceeds the FULL graphs.
_PIECEWISE: dict[str, Any] = {
    "plain": "plain-piecewise",
    "joins": 150,
    "arguments": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}},
}

_HYBRID: dict[str, Any] = {
    "plain": "plain-hybrid",
    "pair": TINY / "hybrid",
    "arguments": {
        # In float32 it does not matter how often a state is rounded.
        "mamba_ssm_cache_dtype": "float32",
        # FlashInfer's kernel for prompts would be compiled first.
        "additional_config": {"gdn_prefill_backend": "triton"},
    },
}

# A block of states has 544 tokens, and ends in the texts that are decoded.
_CACHED: dict[str, Any] = {
    "plain": "plain-cached", "pair": TINY / "hybrid", "long": 541, "tokens": 20,
    "arguments": {**_HYBRID["arguments"], "max_model_len": 1024, "max_num_batched_tokens": 768},
}  # fmt: skip

_ADAPTERS: dict[str, Any] = {
    "plain": "plain-adapters",
    "adapters": True,
    "unlike": (0, 1),
    "arguments": {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK},
}

# These weights give the second prompt the same tokens.
_NEW: dict[str, Any] = {"unlike": (0, 2)}


def _updated(name: str, title: str, plain: str = "varied", **more: Any) -> Case:
    return Case(name, title, _bastion(16, 16), plain, weights=name, like_fresh=True, **more)


CASES = (
    Case("plain", "plain"),
    Case("dflash", "dflash, 15 tokens", {"method": "dflash", "num_speculative_tokens": 15}),
    Case("fixed", "bastion, N = 16", _bastion(16, 16)),
    Case("exact", "adaptive, exact", _bastion(31, "adaptive", budget_timing="exact"), waits=1.0),
    Case("lagged", "adaptive, lagged, no lookup", _bastion(31, "adaptive", lookup=False)),
    Case("lookup", "adaptive, lagged, lookup", _bastion(31, "adaptive")),
    Case("ngram", "n-gram drafts alone", _bastion(31, "adaptive", ngram_cache=512), arm=Arm.NGRAM),
    Case("dflash2", "DFlash2, N = 16", _bastion(16, 16, model=TINY / "dflash2")),
    Case("dspark", "DSpark, lagged", _bastion(15, "adaptive", model=TINY / "dspark")),
    Case("plain-piecewise", "FULL_AND_PIECEWISE: plain", **_PIECEWISE),
    Case("piecewise", "FULL_AND_PIECEWISE: adaptive", _bastion(31, "adaptive"), **_PIECEWISE),
    Case("paper-plain", "paper's command: plain", **_paper("plain")),
    Case("paper-chain", "paper's command: chain", **_paper("nodes=15 budget=15 top_k=1")),
    Case("paper-fixed", "paper's command: N = 16", **_paper("nodes=16 budget=16")),
    Case("paper-adaptive", "paper's command: adaptive", **_paper("nodes=255")),
    Case("plain-hybrid", "hybrid target, plain", **_HYBRID),
    Case("hybrid", "hybrid pair, N = 16", _bastion(16, 16), **_HYBRID),
    Case("plain-cached", "hybrid target, prefix cache, plain", **_CACHED),
    Case("cached", "hybrid pair, prefix cache, N = 16", _bastion(16, 16), **_CACHED),
    Case("plain-adapters", "two adapters, plain", **_ADAPTERS),
    Case("adapters", "two adapters, N = 16", _bastion(16, 16), **_ADAPTERS),
    # vLLM waits for the device to sort a step's rows by adapter, unless the last step had the same.
    Case(
        "adapters-exact",
        "two adapters, adaptive",
        _bastion(31, "adaptive"),
        waits=1.0,
        blocks=7.0,
        **_ADAPTERS,
    ),
    Case("plain-varied", "other weights, plain", plain="plain-varied", weights="varied", **_NEW),
    Case("varied", "other weights, N = 16", _bastion(16, 16), "plain-varied", weights="varied"),
    _updated("reload", "weights reloaded while serving, N = 16", **_NEW),
    _updated("transfer", "weights transferred while serving, N = 16", **_NEW),
    _updated("sleep", "after sleep at level 1, N = 16", plain="fixed"),
    _updated("refill", "after sleep at level 2, other weights, N = 16", **_NEW),
)
