# SPDX-License-Identifier: Apache-2.0
"""What a grammar says of a tree, against the same grammar asked about every node by itself.

Random trees whose tokens the grammar often allows, over real grammars of vLLM's back ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from helpers import engine_config
from tests.scheduler_core import call, make_core
from vllm_bastion import plugin
from vllm_bastion.attached import GrammarTree
from vllm_bastion.engine import grammar

PAIR = Path(__file__).resolve().parents[2] / "benchmarks" / "tiny"
GAMMA, NODES = 15, 24
SPECS = {
    "words": (StructuredOutputOptions.REGEX, r"(ab|cd|[a-f]{3})+x"),
    "json": (
        StructuredOutputOptions.JSON,
        '{"type":"object","properties":{"a":{"enum":[1,23]},"b":{"type":"string"}},'
        '"required":["a"],"additionalProperties":false}',
    ),
    "short": (StructuredOutputOptions.REGEX, r"a?b?"),
}


@pytest.fixture(scope="module")
def engine() -> Any:
    plugin.register()
    return engine_config((str(PAIR / "target"), str(PAIR / "drafter")), {"load_format": "auto"})


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def manager(engine: Any, request: pytest.FixtureRequest) -> Iterator[StructuredOutputManager]:
    made = StructuredOutputManager(engine)
    kind = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}[request.param]
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    vocab = engine.model_config.get_vocab_size()
    made.backend = kind(made.vllm_config, tokenizer=tokenizer, vocab_size=vocab)
    yield made


def new_request(manager: StructuredOutputManager, spec: str, done: list[int]) -> Any:
    """A request whose grammar has accepted some tokens."""
    assert manager.backend is not None
    matcher = manager.backend.compile_grammar(*SPECS[spec])
    assert matcher.accept_tokens("r", done)
    return SimpleNamespace(
        request_id="r", num_tokens=5, use_structured_output=True, is_prefill_chunk=False,
        is_finished=lambda: False, spec_token_ids=[],
        structured_output_request=SimpleNamespace(grammar=matcher, reasoning_ended=True),
    )  # fmt: skip


def row_after(
    manager: StructuredOutputManager, spec: str, done: list[int], path: Sequence[int] = ()
) -> np.ndarray | None:
    """[words] what may follow accepted tokens and a path; None where the path is refused."""
    assert manager.backend is not None
    matcher = manager.backend.compile_grammar(*SPECS[spec])
    bitmask = manager.backend.allocate_token_bitmask(1).fill_(-1)
    for token in done:
        assert matcher.accept_tokens("r", [token])
    # All at once: llguidance takes an end token with those before it, and not after them.
    if matcher.validate_tokens(list(path)) != list(path):
        return None
    for token in path:
        matcher.accept_tokens("r", [token])
    if not matcher.is_terminated():
        matcher.fill_bitmask(bitmask, 0)
    return bitmask[0].numpy().copy()


def allowed(row: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


class Tree:
    """A random tree after some accepted tokens, and what every node's own path leads to."""

    def __init__(self, manager: StructuredOutputManager, spec: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.done: list[int] = []
        for _ in range(int(rng.integers(0, 4))):
            row = row_after(manager, spec, self.done)
            assert row is not None
            options = allowed(row)
            token = int(rng.choice(options))
            if len(options) > 512 or token == 0:
                break
            self.done.append(token)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows = [row_after(manager, spec, self.done)]
        paths, depth = [list[int]()], [0]
        while len(self.tokens) < NODES:
            parent = int(rng.integers(0, len(paths)))
            row = self.rows[parent]
            if depth[parent] == GAMMA:
                continue
            token = int(rng.integers(0, 1024))
            if row is not None and rng.random() < 0.8:
                token = int(rng.choice(allowed(row)))
            self.tokens.append(token)
            self.parents.append(parent)
            depth.append(depth[parent] + 1)
            paths.append([*paths[parent], token])
            self.rows.append(row_after(manager, spec, self.done, paths[-1]))


@pytest.mark.parametrize("spec", SPECS)
def test_every_node_has_the_row_of_its_own_path(
    manager: StructuredOutputManager, spec: str
) -> None:
    refused = 0
    for seed in range(6):
        tree = Tree(manager, spec, seed)
        request = new_request(manager, spec, tree.done)
        found = grammar.walk(manager, request, tree.tokens, tree.parents)
        assert found.tokens == tree.tokens
        for node, row in enumerate(tree.rows):
            if row is not None:
                assert found.rows[node].tolist() == row.tolist(), (seed, node)
        assert found.refused == sum(row is None for row in tree.rows)
        refused += found.refused
        # The grammar is where it was.
        after = row_after(manager, spec, tree.done)
        bitmask = manager.backend.allocate_token_bitmask(1)
        request.structured_output_request.grammar.fill_bitmask(bitmask, 0)
        assert after is not None and bitmask[0].tolist() == after.tolist()
    assert refused > 5


def test_a_refused_token_is_not_allowed_above(manager: StructuredOutputManager) -> None:
    """What makes it safe to leave refused nodes in: nothing leads to them."""
    tree = Tree(manager, "json", 1)
    request = new_request(manager, "json", tree.done)
    found = grammar.walk(manager, request, tree.tokens, tree.parents)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
        if tree.rows[node] is None and tree.rows[parent] is not None:
            assert not found.rows[parent, token // 32] >> (token % 32) & 1


def test_codes_hold_tokens_and_parents() -> None:
    tokens = torch.tensor([[5, 151_935, 7, 9], [-1, -1, -1, -1]])
    parents = torch.tensor([[0, 0, 2, -1], [0, 0, 0, 0]], dtype=torch.int32)
    first, second = grammar.encode(tokens, parents).tolist()
    assert grammar.decode(first) == ([5, 151_935, 7], [0, 0, 2])
    assert grammar.decode(second) == ([], [])


def test_the_scheduler_knows_what_may_follow_each_node(
    engine: Any, manager: StructuredOutputManager
) -> None:
    tree = Tree(manager, "words", 3)
    request = new_request(manager, "words", tree.done)
    core = make_core(
        vllm_config=engine, structured_output_manager=manager, requests={"r": request},
        dynamic_sd_lookup=[],
    )  # fmt: skip
    codes = grammar.encode(torch.tensor(tree.tokens), torch.tensor(tree.parents)).tolist()
    drafts = DraftTokenIds(["r", "gone"], [codes, codes])
    rest: list[Any] = []
    call(core, "update_draft_token_ids", rest.append, drafts)
    assert rest[0].req_ids == ["gone"]
    most = engine.speculative_config.max_grammar_tokens
    assert most == 16 < NODES
    assert request.spec_token_ids == tree.tokens[:most]
    # Of these, as many as were scheduled; of others, nothing is known.
    found = GrammarTree.of(request)
    assert len(found.rows_of(tree.tokens[:2], request.num_tokens)) == 3
    assert found.rows_of(tree.tokens[:2], request.num_tokens + 1) is None
    assert found.rows_of([-5 + 1024], request.num_tokens) is None
    rows = found.rows_of([*tree.tokens[:1], -1, -1], request.num_tokens)
    assert (rows[2:] == -1).all() and rows[1].tolist() == found.rows[1].tolist()
