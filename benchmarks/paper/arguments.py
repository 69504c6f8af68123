# SPDX-License-Identifier: Apache-2.0
"""The command's arguments, and the target that they name."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import benchmarks.paper
from benchmarks import TINY, parser_of
from benchmarks.paper.data import SETS
from benchmarks.paper.kinds import KINDS
from benchmarks.paper.methods import Drafter, Target, config_of
from benchmarks.prompts import DataError
from benchmarks.random_drafter import write_random
from vllm_bastion.checkpoints.kinds import architectures_of, gamma_of, kind_of
from vllm_bastion.envs import cache_dir

REAL = "smollm2"  # the pair of a real chat model
# Of `--quick`; options that were given win.
_QUICK = {"samples": 3, "tokens": 48, "replay_prompts": 2}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(benchmarks.paper.__doc__)
    add = parser.add_argument
    add("--target", help="a model of the Hub, or a folder")
    add("--drafter", help="its DFlash drafter")
    add("--eagle3", help="its EAGLE-3 head")
    add("--drafters", nargs="+", default=[], help="names, folders, of a pair; random")
    add("--pair", help=f"in place of these: tiny, hybrid, {REAL}, or a shape of benchmarks.widen")
    add("--sets", nargs="+", default=[], metavar="SET", help=f"of {', '.join(SETS)}")
    add("--long", action="store_true", help="the seven sets of LongBench too")
    add("--data", nargs="+", default=[], metavar="SET=FILE", help="local copies of sets")
    add("--jsonl", nargs="+", type=Path, default=[], help="own prompts; Spec-Bench, SPEED-Bench")
    add("--samples", type=int, help="prompts per set (default: the paper's)")
    add("--tokens", type=int, default=2048, help="most new tokens (default 2048)")
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    add("--concurrency", nargs="+", type=int, default=[1], help="1 4 16 64 for the load tables")
    add("--kinds", nargs="+", default=[], choices=KINDS, help="what requests ask for; sets of each")
    add("--alive", type=int, help="engines side by side (default: a CPU's memory full; GPU: 1)")
    add("--methods", nargs="+", default=[], help="their names, or parts of names; plain always")
    add("--budgets", nargs="+", type=int, default=[], help="fixed budgets N")
    add("--seed", type=int, default=0)
    add("--dtype", help="default: bfloat16; float32 for the tiny pair")
    add("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    add("--cudagraphs", metavar="MODE", help="vLLM's cudagraph_mode, such as FULL_DECODE_ONLY")
    add("--raw", action="store_true", help="no chat template (toy pairs: always)")
    add("--ignore-eos", action="store_true", help="always decode --tokens (toy pairs: always)")
    add("--max-model-len", type=int, help="default: what prompts need and the model has")
    add("--replay-prompts", type=int, default=4, help="prompts per set to replay; 0: none")
    add("--quick", action="store_true", help="minutes on two cores: the tiny pair, own prompts")
    add("--out", type=Path, help="the JSONL file (default: results/paper/NAME.jsonl)")
    given = parser.parse_args(argv)
    if given.quick:
        given.pair = given.pair or (None if given.target else "tiny")
        for name, value in _QUICK.items():
            if getattr(given, name) == parser.get_default(name):
                setattr(given, name, value)
    if (given.pair is None) == (given.target is None):
        parser.error("name --target and --drafter, or --pair")
    unknown = [name for name in given.sets if name not in SETS]
    if unknown:
        parser.error(f"no set {unknown[0]}: choose from {', '.join(SETS)}")
    for pair in given.data:
        if pair.partition("=")[0] not in SETS or "=" not in pair:
            parser.error(f"--data needs SET=FILE, not {pair!r}")
    return given


def target_of(given: argparse.Namespace) -> Target:
    """The target; fills in what a pair of ours implies. Raises DataError: it cannot be had."""
    if given.pair is not None:
        source = folder = pair_folder(given.pair)
        if given.max_model_len:
            folder = longer(given.pair, source, given.max_model_len)
        given.dtype = given.dtype or pair_dtype(given.pair)
        given.sets = given.sets or [one.partition("=")[0] for one in given.data]
        if given.pair != REAL:
            given.raw = given.ignore_eos = True
            given.jsonl = given.jsonl or ([] if given.sets else [TINY / "prompts.jsonl"])
        if given.tokens == 2048:
            given.tokens = 256 if given.pair == REAL else 64
        given.target, given.drafter = str(folder / "target"), str(folder / "drafter")
        given.drafters = [pair_drafter(given.pair, source, name) for name in given.drafters]
        head = TINY / "eagle3"
        if given.pair == "tiny" and head.is_dir():
            given.eagle3 = given.eagle3 or str(head)
    given.dtype = given.dtype or "bfloat16"
    gamma = 15 if given.drafter is None else gamma_of(config_of(given.drafter)) or 15
    others = tuple(drafter_of(name) for name in given.drafters)
    return Target(given.target, given.drafter, gamma, given.eagle3, others)


def drafter_of(name: str) -> Drafter:
    """A further drafter, by its checkpoint.

    Raises DataError: method bastion does not support it.
    """
    config = config_of(name)
    kind = kind_of(architectures_of(config))
    gamma = gamma_of(config)
    if kind is None or gamma is None:
        raise DataError(f"{Path(name).name} has no drafter that method bastion supports")
    stock = "DFlashDraftModel" in kind.architectures
    return Drafter(name, gamma, kind.method, stock)


def pair_folder(name: str) -> Path:
    """A pair of `benchmarks/tiny`, of `benchmarks.smollm2`, or of a shape of `benchmarks.widen`.

    Raises DataError: there is no such pair.
    """
    if name == "tiny":
        return TINY
    if name == "hybrid":
        return TINY / name
    if name == REAL:
        folder = cache_dir() / "pairs" / REAL
        if not (folder / "target").is_dir() or not (folder / "drafter").is_dir():
            raise DataError(f"the pair {REAL} is not there yet: python -m benchmarks.{REAL}")
        return folder
    from benchmarks.widen.pairs import pair_of
    from benchmarks.widen.widening import SHAPES

    if name not in SHAPES:
        raise DataError(f"no pair {name}: choose from tiny, hybrid, {REAL}, {', '.join(SHAPES)}")
    return pair_of(name)


def pair_drafter(pair: str, folder: Path, name: str) -> str:
    """A further drafter of a pair by its name, or by any other name for what that names.

    `random` is a drafter of the pair's own shape that is never right.
    """
    if name == "random":
        return str(write_random(folder / "drafter", cache_dir() / "random" / pair / name))
    if pair not in ("tiny", REAL) and name == "dflash2":
        from benchmarks.widen.pairs import drafter_of as wide_drafter_of

        return str(wide_drafter_of(pair, name))
    return str(folder / name) if (folder / name).is_dir() else name


def longer(name: str, pair: Path, positions: int) -> Path:
    """The pair, or a copy with room for that many positions in its configs; weights are linked.

    The folder is always the same one, because code that vLLM compiles is stored by it.
    """
    kinds = ("target", "drafter")
    configs = {kind: json.loads((pair / kind / "config.json").read_text()) for kind in kinds}
    if all(config["max_position_embeddings"] >= positions for config in configs.values()):
        return pair
    copy = cache_dir() / "long" / f"{name}-{positions}"
    shutil.rmtree(copy, ignore_errors=True)
    for kind, config in configs.items():
        folder = copy / kind
        folder.mkdir(parents=True)
        for path in (pair / kind).iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path.resolve())
        most = max(config["max_position_embeddings"], positions)
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": most}))
    return copy


def pair_dtype(name: str) -> str:
    """The type that a pair runs in: the tiny one in float32, so that two runs emit the same.

    vLLM's linear attention on a CPU takes bfloat16 only, so the hybrid pair cannot.
    """
    return "float32" if name == "tiny" else "bfloat16"
