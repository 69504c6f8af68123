# SPDX-License-Identifier: Apache-2.0
"""Time a decoding step of vLLM at the shapes of Qwen3-8B, without its weights: needs a GPU.

    python benchmarks/gpu/bench_step.py [--contexts 1024 8192] [--nodes 16 32 63 127] [--profile]
        [--only NAME ...] [--compilation JSON] [--out FILE.json]

Plain decoding, vLLM's own DFlash chain, the same chain in bastion, and bastion trees of fixed
sizes, each in its own engine with `--load-format dummy`, CUDA graphs and async scheduling. With
random weights nothing is accepted, so every step emits one token, and the time of a step is the
slope of the run time over the number of tokens: the cost of verification without its gain. The two
chains verify the same rows, so their difference is bastion's overhead; `--profile` lists its parts.
"exact" and "lagged" are the controller's two timings with flat costs, so that both verify all
nodes: their difference is the time spent waiting for N*.

The file is rewritten after every engine, and a failed engine does not stop the others. `--tiny`
runs the same with the tiny pair on any device, as a test of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.device import gpu_provenance
from benchmarks.gpu.step_profile import profile_steps, profiler_config
from benchmarks.harness.process import EngineError, EngineProcess
from vllm_bastion.policy.cost.store import Profile, ProfileKey, write_profile
from vllm_bastion.policy.cost.table import StepCostTable

ROOT = Path(__file__).resolve().parents[2]
GAMMA = 15
_EXIT_S = 60
# The published configurations of Qwen3-8B and of its DFlash drafter (5 layers, block 16).
_COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN3_8B = {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36}
QWEN3_8B_DRAFTER = {
    **_COMMON,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "block_size": GAMMA + 1,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}


def modes(drafter: str, nodes: list[int], flat: str) -> dict[str, dict[str, Any] | None]:
    """Name -> `speculative_config`. flat: a profile in which rows cost nothing."""
    bastion = {"method": "bastion", "model": drafter, "bastion_calibration": "off"}
    chain = {**bastion, "num_speculative_tokens": GAMMA, "bastion_budget": GAMMA}
    costs = {"bastion_calibration": flat, "bastion_latency_model": "table"}
    return {
        "plain": None,
        "dflash chain": {"method": "dflash", "model": drafter, "num_speculative_tokens": GAMMA},
        "bastion chain": {**chain, "bastion_top_k": 1},
        f"bastion {GAMMA} nodes": chain,
        **{
            f"bastion {n} nodes": {**bastion, "num_speculative_tokens": n, "bastion_budget": n}
            for n in nodes
        },
        **{
            f"bastion {n} nodes, {timing}": {
                **bastion,
                **costs,
                "num_speculative_tokens": n,
                "bastion_budget_timing": timing,
            }
            for n in nodes
            if n == 63
            for timing in ("exact", "lagged")
        },
    }


def time_steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    """In a new process: milliseconds of a step at each context."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        speculative_config=job["speculative"],
        load_format="auto" if job["tiny"] else "dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(job["contexts"]) + job["tokens"] + 256,
        max_num_seqs=job["batch"],
        max_num_batched_tokens=job["rows"],
        enforce_eager=not torch.cuda.is_available(),
        compilation_config=job["compilation"],
        profiler_config=profiler_config(job["traces"]) if job["profile"] else None,
        seed=0,
    )

    def seconds(context: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * i + r) % 1000 + 2 for i in range(context)]}
            for r in range(job["batch"])
        ]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    rows = []
    for context in job["contexts"]:
        seconds(context, job["tokens"])  # first use of a shape
        slopes = [
            1e3 * (seconds(context, job["tokens"]) - seconds(context, 1)) / (job["tokens"] - 1)
            for _ in range(job["repeats"])
        ]
        step_ms = statistics.median(slopes)
        row: dict[str, Any] = {"context": context, "ms": step_ms, "worst_ms": max(slopes)}
        if job["profile"]:
            generate, steps = partial(seconds, context), min(32, job["tokens"] - 1)
            row["profile"] = profile_steps(llm, generate, steps, step_ms, Path(job["traces"]))
        rows.append(row)
    # Otherwise this process would wait forever for the engine core, its child.
    llm.llm_engine.engine_core.shutdown()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 63, 127])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--only", nargs="+", help="names of modes to run")
    parser.add_argument("--profile", action="store_true", help="list the parts of a step")
    parser.add_argument("--compilation", type=json.loads, help="vLLM's compilation_config")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    if not options.tiny and not torch.cuda.is_available():
        print("bench_step: this needs a GPU; --tiny runs the tiny pair on the CPU")
        return 1
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    result: dict[str, Any] = {"provenance": gpu_provenance(), "complete": False, "steps": {}}
    with tempfile.TemporaryDirectory() as folder:
        target, drafter, traces = (Path(folder) / name for name in ("target", "drafter", "traces"))
        traces.mkdir()
        if options.tiny:
            target, drafter = ROOT / "benchmarks/tiny/target", ROOT / "benchmarks/tiny/drafter"
        else:
            for path, config in ((target, QWEN3_8B), (drafter, QWEN3_8B_DRAFTER)):
                path.mkdir()
                (path / "config.json").write_text(json.dumps(config))
        flat = Path(folder) / "flat.json"
        # Make plain steps expensive: nothing is accepted, and the controller would stop drafting.
        samples = [(rows, 0, 10.0) for rows in (1, options.rows)]
        table = StepCostTable(samples, max_rows=options.rows, plain_aux_ms=1e4)
        write_profile(Profile(ProfileKey("flat", "", "", "", "", 1, ""), table), flat)
        common = {
            "target": str(target),
            "traces": str(traces),
            **{name: value for name, value in vars(options).items() if name != "out"},
        }
        for name, speculative in modes(str(drafter), options.nodes, str(flat)).items():
            if options.only and name not in options.only:
                continue
            process = EngineProcess(Path(folder) / "engine.log")
            try:
                process.call(time_steps, {**common, "speculative": speculative})
                result["steps"][name] = process.answer()
            except EngineError as error:
                print(f"{name} failed: {error}", file=sys.stderr)
                result.setdefault("failed", {})[name] = str(error)
            finally:
                process.close(_EXIT_S)
            _print_steps(name, result["steps"].get(name, ()))
            _write(result, options.out)
    _print_differences(result["steps"])
    result["complete"] = True
    _write(result, options.out)
    return 1 if "failed" in result else 0


def _write(result: dict[str, Any], out: Path | None) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def _print_steps(name: str, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        line = f"{name:24s} context {row['context']:6d}  {row['ms']:8.3f} ms/step"
        profile = row.get("profile")
        if profile and profile["busy_ms"]:  # a CPU has no device trace
            ours = ", ".join(f"{kernel} {ms:.3f}" for kernel, ms in profile["ours"].items())
            line += f", busy {profile['busy_ms']:.3f}, idle {profile['idle_ms']:.3f}; {ours}"
        print(line, flush=True)


def _print_differences(steps: dict[str, list[dict[str, Any]]]) -> None:
    differences = [
        ("bastion chain", "dflash chain", "overhead (bastion chain - dflash chain)"),
        (f"bastion {GAMMA} nodes", "bastion chain", "mask, compaction and path gather"),
    ]
    exact = [name for name in steps if name.endswith(", exact")]
    differences += [
        (name, name.replace("exact", "lagged"), f"waiting for N* ({name})") for name in exact
    ]
    for ours, theirs, what in differences:
        for a, b in zip(steps.get(ours, ()), steps.get(theirs, ()), strict=False):
            print(f"{what}, context {a['context']}: {a['ms'] - b['ms']:+.3f} ms")


if __name__ == "__main__":
    sys.exit(main())
