# SPDX-License-Identifier: Apache-2.0
"""Milliseconds that a grammar adds to a step, for a tree of 63 nodes and a chain of 15.

    python -m benchmarks.grammar_ops [--repeats 200]

`core` is the engine core's part: find the tokens that may follow each node, with xgrammar's walk
over the tree and with vLLM's own loop over a chain. `worker` is vLLM's masking of the logits, by
the native version of its kernel. One request with a JSON schema, whose string is unbounded or has a
`maxLength` that xgrammar must count. The vocabulary has the tiny pair's 1,024 tokens or Qwen3's
size, made of random words. The grammar allows all nodes.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from benchmarks import TINY
from benchmarks.cpu_ops import ints, milliseconds
from benchmarks.harness.engine import bastion
from benchmarks.kinds import KINDS
from vllm_bastion import plugin
from vllm_bastion.cpu.twins import TWINS
from vllm_bastion.engine.grammar import walk

NODES, CHAIN, QWEN3 = 63, 15, 151_936
_APPLY = TWINS["vllm.v1.worker.gpu.structured_outputs:_apply_grammar_bitmask_kernel"]
_LETTERS = 'Ġaaeeiioutnsrhldcmfpgwybv.,":{}0123456789'


def tokenizer_of(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer of every byte and random words."""
    rng, tokens = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    known = set(tokens)
    while len(tokens) < vocab:
        word = "".join(rng.choices(_LETTERS, k=rng.randint(2, 8)))
        if word not in known:
            known.add(word)
            tokens.append(word)
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=tokens[0])


def manager_of(vocab: int) -> StructuredOutputManager:
    """vLLM's manager of grammars."""
    plugin.register()
    config = EngineArgs(
        model=str(TINY / "target"), speculative_config=bastion(TINY / "drafter", NODES, NODES),
        max_model_len=256, enforce_eager=True,
    ).create_engine_config()  # fmt: skip
    manager = StructuredOutputManager(config)
    own = AutoTokenizer.from_pretrained(TINY / "target") if vocab < QWEN3 else tokenizer_of(vocab)
    manager.backend = XgrammarBackend(config, tokenizer=own, vocab_size=vocab)
    return manager


def request_of(manager: StructuredOutputManager, bounded: bool) -> Any:
    """A request at the start of its answer."""
    assert manager.backend is not None
    schema = copy.deepcopy(KINDS["JSON"]["structured_outputs"]["json"])
    if not bounded:
        del schema["properties"]["name"]["maxLength"]
    schema = json.dumps(schema)
    grammar = manager.backend.compile_grammar(StructuredOutputOptions.JSON, schema)
    return SimpleNamespace(
        request_id="r", num_tokens=5, use_structured_output=True,
        structured_output_request=SimpleNamespace(grammar=grammar, reasoning_ended=True),
    )  # fmt: skip


def random_nodes(manager: StructuredOutputManager, request: Any, chain: bool) -> Any:
    """Random nodes that the grammar allows: tokens and parents."""
    rng = np.random.default_rng(1)
    tokens, parents, depths = list[int](), list[int](), [0]
    while len(tokens) < (CHAIN if chain else NODES):
        parent = len(tokens) if chain else int(rng.integers(max(0, len(tokens) - 8), len(depths)))
        if depths[parent] == CHAIN:
            continue
        row = walk(manager, request, tokens, parents, False).rows[parent]
        options = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        tokens.append(int(rng.choice(options)))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    assert not walk(manager, request, tokens, parents, False).refused
    return tokens, parents


def operations(vocab: int, bounded: bool) -> dict[str, Callable[[], object]]:
    """The timed functions by name."""
    manager = manager_of(vocab)
    request = request_of(manager, bounded)
    chain = random_nodes(manager, request, chain=True)
    tree = random_nodes(manager, request, chain=False)
    fill_chain = inspect.unwrap(StructuredOutputManager.grammar_bitmask)
    rows = {
        "chain": lambda: fill_chain(manager, {"r": request}, ["r"], {"r": chain[0]}),
        "tree": lambda: walk(manager, request, *tree, True).rows,
    }
    operations: dict[str, Callable[[], object]] = {}
    for name, fill in rows.items():
        bitmask = torch.from_numpy(np.asarray(fill()))
        count = len(bitmask)
        logits, rows_of = torch.randn(count, vocab), torch.arange(count).int()
        args = (logits, vocab, rows_of, ints(0, count), bitmask, bitmask.stride(0), vocab)
        launch = _APPLY[count, -(-vocab // 8192)]
        operations[f"{name}, core"] = fill
        operations[f"{name}, worker"] = partial(
            launch, *args, MASK_STRIDE=NODES + 1, BLOCK_SIZE=8192
        )
    return operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    print(f"{torch.get_num_threads()} threads, {repeats} repeats, median (best) ms")
    for vocab, bounded in product((1024, QWEN3), (False, True)):
        case = f"vocabulary {vocab:6}{', maxLength' if bounded else '':11}"
        for name, times in milliseconds(operations(vocab, bounded), repeats).items():
            print(f"{case} {name:14} {median(times):7.3f} ({min(times):.3f})")


if __name__ == "__main__":
    main()
