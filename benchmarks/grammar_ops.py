# SPDX-License-Identifier: Apache-2.0
"""Milliseconds that a request with a grammar adds to a step: a tree of 63 nodes, a chain of 15.

    python -m benchmarks.grammar_ops [--repeats 200]

The schema has a string, free or with a `maxLength`, which xgrammar has to count.

`core` is the engine core's part: what may follow each node, by xgrammar's walk over the tree, and
by vLLM's own loop over a chain. `worker` is what vLLM does with the rows: -inf in the logits, by
the native twin of its kernel. One request, a JSON schema, a vocabulary of 1,024 tokens (the tiny
pair's) and one of Qwen3's size, made of random words. All nodes are allowed by the grammar.
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
    """Every byte, and random words."""
    rng, tokens = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    known = set(tokens)
    while len(tokens) < vocab:
        word = "".join(
            rng.choices('Ġaaeeiioutnsrhldcmfpgwybv.,":{}0123456789', k=rng.randint(2, 8))
        )
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
    """A request that is about to answer."""
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
    """Tokens and parents of nodes that the grammar allows."""
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
    """What is timed, by name."""
    manager = manager_of(vocab)
    request = request_of(manager, bounded)
    chain = random_nodes(manager, request, chain=True)
    tree = random_nodes(manager, request, chain=False)
    of_chain = inspect.unwrap(StructuredOutputManager.grammar_bitmask)
    rows = {
        "chain": lambda: of_chain(manager, {"r": request}, ["r"], {"r": chain[0]}),
        "tree": lambda: walk(manager, request, *tree, True).rows,
    }
    operations: dict[str, Callable[[], object]] = {}
    for name, fill in rows.items():
        bitmask = torch.from_numpy(np.asarray(fill()))
        count = len(bitmask)
        logits, places = torch.randn(count, vocab), torch.arange(count).int()
        args = (logits, vocab, places, ints(0, count), bitmask, bitmask.stride(0), vocab)
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
