# SPDX-License-Identifier: Apache-2.0
"""Other weights for a case: from the start, or for an engine that has already served.

An engine may also sleep in between. What it then gives up holds other bytes when it wakes up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.weight_updates import in_parts, register, vary
from tests.rehearsal.cases import TINY, Case

# Tokens decoded before an update, with a prompt of their own.
_TOKENS, _PROMPT = 6, "for i in range"


class NewWeights:
    """Varied weights of the tiny pair's target and drafter.

    Args:
        case: its `weights` says when they come.
        arguments: the engine's arguments, which are changed where they say more.
        folder: where the varied checkpoints are written.
    """

    def __init__(self, case: Case, arguments: dict[str, Any], folder: Path) -> None:
        self._way = case.weights
        arguments["enable_sleep_mode"] = case.weights in ("sleep", "refill")
        if case.weights == "sleep":
            return
        self._target = vary(str(TINY / "target"), folder / "target", by=0.1, seed=1)
        self._drafter = vary(str(TINY / "drafter"), folder / "drafter", by=0.1, seed=2)
        speculative = arguments["speculative_config"]
        if case.weights == "varied":
            arguments["model"] = self._target
        if case.weights in ("transfer", "refill"):
            register()
            arguments["weight_transfer_config"] = {"backend": "file"}
        elif speculative is not None:  # `reload_weights` has no way to name the drafter
            speculative["model"] = self._drafter

    def update(self, engine: Any) -> None:
        """Decode some tokens with the old weights, then sleep or load the new ones."""
        if self._way == "varied":
            return
        _decode(engine)
        if self._way == "sleep":
            engine.sleep(level=1)
            engine.wake_up()
        elif self._way == "reload":
            engine.collective_rpc("reload_weights", kwargs={"weights_path": self._target})
        elif self._way == "transfer":
            self._transfer(engine)
        else:
            engine.sleep(level=2)
            engine.wake_up(tags=["weights"])
            self._transfer(engine)
            engine.wake_up(tags=["kv_cache"])
        engine.reset_prefix_cache()

    def _transfer(self, engine: Any) -> None:
        engine.collective_rpc("init_weight_transfer_engine", args=({},))
        for start, path in (
            ("start_weight_update", self._target),
            ("start_draft_weight_update", self._drafter),
        ):
            engine.collective_rpc(start)
            for info in in_parts(path):
                engine.collective_rpc("update_weights", args=(info,))
            engine.collective_rpc("finish_weight_update")


def _decode(engine: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    engine.add_request("before", {"prompt": _PROMPT}, params)
    while engine.has_unfinished_requests():
        engine.step()
