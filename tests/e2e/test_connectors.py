# SPDX-License-Identifier: Apache-2.0
"""Two engines over a KV connector: one saves what it decoded with trees, the other continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, leaving_the_chain
from tests.e2e.engines import Batch, Engine
from tests.e2e.marks import on_cpu
from vllm_bastion.validate.engine import _SAVE_AT_STEP_END, saving_too_early

pytestmark = on_cpu("the connector's blocks are a CPU's")

NODES, KEPT = 24, 44  # tokens of an answer that the second prompt repeats
BLOCK = 32


def connector(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "StepEndConnector",
        "kv_connector_module_path": "tests.e2e.step_end_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder)},
    }


def several(*parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(parts)},
    }


def over(engine: Engine, config: dict[str, Any]) -> Engine:
    return engine.of(kv_transfer_config=config)


def first() -> Batch:
    params = {"temperature": 0.8, "seed": 5, "max_tokens": 60, "ignore_eos": True}
    return cases.texts("before a connector", 2, first=9, every=3, **params)


def second(run: dict[str, Any]) -> Batch:
    """The same texts with the first tokens of the answers, to be continued."""
    batch = Batch("continued over a connector")
    for name, result in run["batches"][0]["requests"].items():
        prompt = result["prompt_token_ids"] + result["token_ids"][:KEPT]
        batch.add(f"{name}-on", prompt, temperature=0, max_tokens=32, ignore_eos=True)
    return batch


def tau(run: dict[str, Any]) -> float:
    paths = run["batches"][0]["paths"]
    return sum(map(len, paths)) / len(paths)


def assert_loaded(run: dict[str, Any]) -> None:
    """Every full block of every prompt but its last token came over the connector."""
    for result in run["batches"][0]["requests"].values():
        full = (len(result["prompt_token_ids"]) - 1) // BLOCK * BLOCK
        assert result["cached_tokens"] == full > len(result["prompt_token_ids"]) - KEPT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "async", "several"])
def test_another_engine_continues(compare: Comparison, tmp_path: Path, kind: str) -> None:
    """Tokens are plain decoding's, and the drafter's context arrives with the target's."""
    plain = Engine(eager=True, async_scheduling=kind == "async")
    config = connector(tmp_path / "blocks")
    if kind == "several":
        config = several(config, connector(tmp_path / "copies"))
    expected = compare.run(plain, [first()])
    continued = second(expected)
    expected_on = compare.submit(plain, [continued])
    tree = plain.with_bastion(NODES, NODES)
    saved = compare.run(over(tree, config), [first()])
    loaded = compare.run(over(tree, config), [continued])
    compare.same(f"saving, {kind}", [first()], expected, saved)
    compare.same(f"loading, {kind}", [continued], expected_on.result(), loaded)
    assert leaving_the_chain(saved["batches"][0]["paths"])
    assert_loaded(loaded)
    if kind != "one":
        # Several requests at once have their first trees when others' prompts no longer fill the
        # steps, and a request whose prompt is loaded sooner than one that computes it.
        tree = replace(tree, max_num_seqs=1)
        alone = compare.submit(tree, [continued])
        loaded = compare.run(over(tree, config), [continued])
        assert_loaded(loaded)
        assert loaded["batches"][0]["paths"] == alone.result()["batches"][0]["paths"]


@pytest.mark.slow
def test_without_the_drafters_context(compare: Comparison, tmp_path: Path) -> None:
    """The first engine decodes plainly. Tokens are right, and drafts are worse at first."""
    plain, config = Engine(eager=True), connector(tmp_path / "blocks")
    expected = compare.run(plain, [first()])
    continued = second(expected)
    tree = plain.with_bastion(NODES, NODES)
    alone = compare.submit(tree, [continued])
    compare.run(over(plain, config), [first()])
    loaded = compare.run(over(tree, config), [continued])
    compare.same("loading without drafts", [continued], compare.run(plain, [continued]), loaded)
    assert_loaded(loaded)
    print(f"tau {tau(loaded):.2f} without the drafter's context, {tau(alone.result()):.2f} with it")
    assert 1 < tau(loaded) < tau(alone.result())


def does_nothing(method: Any) -> bool:
    """Whether a method has no code that could reach anything."""
    return not method.__code__.co_names


@pytest.mark.parametrize(
    "name", ["ExampleConnector", "LMCacheConnectorV1", *sorted(_SAVE_AT_STEP_END)]
)
def test_which_connectors_save_too_early(name: str) -> None:
    """vLLM's, as the installed version has them, and one behind another."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = {"kv_connector": name, "kv_role": "kv_both"}
    connector = KVConnectorFactory.get_connector_class(KVTransferConfig(**config))
    sound = does_nothing(connector.save_kv_layer) and does_nothing(connector.finish_forward)
    assert sound == (name in _SAVE_AT_STEP_END)
    assert saving_too_early(KVTransferConfig(**config)) == (None if sound else name)
    early = "ExampleConnector" if sound else name
    both = several(config, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
    assert saving_too_early(KVTransferConfig(**both)) == early


def test_a_connector_of_others_says_when_it_saves(tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig

    own = KVTransferConfig(**connector(tmp_path))
    assert saving_too_early(own) is None
    own.kv_connector_module_path = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    own.kv_connector = "NixlConnector"
    assert saving_too_early(own) == "NixlConnector", "by another path it may be another one"
