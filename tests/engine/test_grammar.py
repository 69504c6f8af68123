# SPDX-License-Identifier: Apache-2.0
"""A grammar's bitmask rows, from the engine core to the logits; both ends are vLLM's own."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from helpers import engine_config
from tests.scheduler_core import make_core
from vllm_bastion import config
from vllm_bastion.engine.grammar import walk
from vllm_bastion.hooks import runner
from vllm_bastion.hooks.model_runner import BastionModelRunner

GAMMA, VOCAB, WORDS = 7, 512, 16


class Counting:
    """A grammar whose k-th state allows token `first + k` and nothing else."""

    def __init__(self, first: int) -> None:
        self.token = first

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        bitmask[index].zero_()
        bitmask[index, self.token // 32] = 1 << self.token % 32

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.token += len(tokens)
        return True

    def rollback(self, count: int) -> None:
        self.token -= count

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [token for place, token in enumerate(tokens) if token == self.token + place]

    def is_terminated(self) -> bool:
        return False


@pytest.fixture(params=[32, 3])
def engine(request: pytest.FixtureRequest, pair: tuple[str, str]) -> Any:
    """More nodes than gamma, and fewer."""
    arguments = {"max_num_seqs": 4, "skip_tokenizer_init": True}
    return engine_config(pair, arguments, num_speculative_tokens=request.param)


def rows_of_core(engine: Any, drafts: dict[str, int]) -> np.ndarray:
    """What the engine core sends for requests with so many drafts, all allowed by the grammars."""
    manager = StructuredOutputManager(engine)
    manager.backend = SimpleNamespace(
        allocate_token_bitmask=lambda count: torch.zeros(count, WORDS, dtype=torch.int32)
    )
    requests = {
        name: SimpleNamespace(
            request_id=name,
            num_tokens=9,
            use_structured_output=True,
            is_prefill_chunk=False,
            structured_output_request=SimpleNamespace(
                grammar=Counting(40 * number), reasoning_ended=True
            ),
        )
        for number, name in enumerate(drafts)
    }
    scheduled = {}
    for name, count in drafts.items():
        request, first = requests[name], requests[name].structured_output_request.grammar.token
        tokens, above = list(range(first, first + count)), list(range(count))
        tree = walk(manager, request, tokens, above)
        tree.attach(request)
        if count:
            scheduled[name] = tree.tokens
    core = make_core(
        vllm_config=engine, structured_output_manager=manager, requests=requests,
        dynamic_sd_lookup=[],
    )  # fmt: skip
    step = SimpleNamespace(
        has_structured_output_requests=True,
        num_scheduled_tokens=drafts,
        scheduled_spec_decode_tokens=scheduled,
    )
    output = core.get_grammar_bitmask(step)
    assert output is not None and output.structured_output_request_ids == list(drafts)
    return output.grammar_bitmask


def worker_of(engine: Any) -> Any:
    """The worker's end, built as vLLM's runner builds it."""
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    stride = engine.uniform_decode_query_len
    given = {
        "max_num_logits": engine.scheduler_config.max_num_seqs * stride, "vocab_size": VOCAB,
        "device": torch.device("cpu"), "mask_stride": stride, "num_bonus_tokens": 1,
    }  # fmt: skip
    taken = inspect.signature(StructuredOutputsWorker).parameters
    with set_current_vllm_config(engine):
        return runner.structured_outputs_worker(
            StructuredOutputsWorker, **{k: v for k, v in given.items() if k in taken}
        )


def allowed_tokens(
    worker: Any, verified: dict[str, int], scheduled: dict[str, int], names: list[str], rows: Any
) -> dict[str, list[list[int]]]:
    """Request -> the tokens left at each of its logits rows, as many as drafts verified and one."""
    starts = np.cumsum([0, *(1 + count for count in verified.values())]).astype(np.int32)
    batch = SimpleNamespace(
        req_ids=list(verified),
        cu_num_logits=torch.from_numpy(starts),
        cu_num_logits_np=starts,
        num_draft_tokens_per_req=np.array([scheduled[name] for name in verified]),
    )
    logits = torch.zeros(int(starts[-1]), VOCAB)
    worker.apply_grammar_bitmask(logits, batch, names, rows)
    left = [(row == 0).nonzero().flatten().tolist() for row in logits]
    return {name: left[starts[i] : starts[i + 1]] for i, name in enumerate(verified)}


def test_each_row_of_logits_meets_its_own_row_of_the_bitmask(engine: Any) -> None:
    most = min(GAMMA, engine.speculative_config.num_speculative_tokens)
    scheduled = {"b": 0, "a": most, "c": 2}
    rows = rows_of_core(engine, scheduled)
    # In the batch's order, some drafts trimmed away, and one request without a grammar.
    verified = {"a": most - 1, "free": 2, "c": 2, "b": 0}
    left = allowed_tokens(
        worker_of(engine), verified, scheduled | {"free": 2}, list(scheduled), rows
    )
    assert left.pop("free") == [list(range(VOCAB))] * 3
    first = {name: 40 * number for number, name in enumerate(scheduled)}
    assert left == {
        name: [[first[name] + row] for row in range(verified[name] + 1)] for name in left
    }


def test_the_bitmask_has_rows_for_the_drafts_that_a_grammar_checks(engine: Any) -> None:
    assert worker_of(engine).grammar_bitmask.shape == (
        4 * (1 + engine.speculative_config.max_grammar_tokens),
        WORDS,
    )


def test_rows_for_all_nodes_as_in_vllms_warm_up_are_cut(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_MAX_GRAMMAR_NODES", GAMMA)
    nodes = engine.speculative_config.num_speculative_tokens
    kept, taken = 1 + min(GAMMA, nodes), []
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", lambda _, given: taken.append(given))
    model_runner = object.__new__(BastionModelRunner)
    model_runner.vllm_config, model_runner.decode_query_len = engine, 1 + nodes
    model_runner.adaptive_verification = model_runner.execute_model_state = None
    numbers = np.arange(2 * (1 + nodes), dtype=np.int32).reshape(-1, 1)
    for rows in (numbers, numbers[: kept + 1]):  # the second is of a real step
        given = GrammarOutput(["a", "b"], np.repeat(rows, WORDS, axis=1))
        model_runner.sample_tokens(given)
    expected = [*range(kept), *range(1 + nodes, 1 + nodes + kept)]
    assert taken[0].grammar_bitmask.shape == (2 * kept, WORDS)
    assert taken[0].grammar_bitmask[:, 0].tolist() == expected
    assert taken[1] is given
