# SPDX-License-Identifier: Apache-2.0
"""N where the user names none, and what a model's length holds."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from helpers import is_one_sentence
from vllm_bastion.checks import BastionConfigError
from vllm_bastion.platform import current_host


def nodes_of(pair: tuple[str, str], limits: dict[str, int], **keys: Any) -> int:
    """N of an engine; `engine_config` would name one."""
    args = EngineArgs(
        model=pair[0], speculative_config={"method": "bastion", "model": pair[1]} | keys,
        max_num_seqs=2, enforce_eager=True, load_format="dummy", **limits,
    )  # fmt: skip
    return args.create_engine_config().speculative_config.num_speculative_tokens


@pytest.mark.parametrize(
    ("keys", "limit", "nodes"),
    [
        ({}, 512, "default"), ({"num_speculative_tokens": None}, 512, "default"),
        ({}, 48, 48 - 1 - 7), ({"bastion_top_k": 1}, 512, 7), ({"bastion_budget": 20}, 512, 20),
        ({"bastion_budget": 0}, 512, 1), ({"num_speculative_tokens": 9}, 48, 9),
    ],
)  # fmt: skip
def test_the_number_of_nodes_may_be_left_out(
    pair: tuple[str, str], keys: dict[str, Any], limit: int, nodes: Any
) -> None:
    expected = current_host().default_nodes if nodes == "default" else nodes
    limits = {"max_model_len": 256, "max_num_batched_tokens": limit}
    assert nodes_of(pair, limits, **keys) == expected


def test_a_tree_fits_into_the_models_length(pair: tuple[str, str]) -> None:
    limits = {"max_model_len": 40}
    assert nodes_of(pair, limits) == 40 - 1 - 7
    assert nodes_of(pair, limits, num_speculative_tokens=39) == 39
    with pytest.raises(BastionConfigError) as caught:
        nodes_of(pair, limits, num_speculative_tokens=40)
    is_one_sentence(str(caught.value), '"num_speculative_tokens": 40', "max_model_len 40", "39")


def test_a_limit_that_holds_no_tree_is_refused_without_a_number_of_nodes_too(
    pair: tuple[str, str],
) -> None:
    with pytest.raises(BastionConfigError, match="raise max_num_batched_tokens"):
        nodes_of(pair, {"max_model_len": 8, "max_num_batched_tokens": 8})
