# SPDX-License-Identifier: Apache-2.0
"""Names and keys that would have no effect: each is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from helpers import engine_config, is_one_sentence, is_refused
from vllm_bastion.hooks.requests import check_budget
from vllm_bastion.validate import BastionConfigError
from vllm_bastion.validate.arguments import refuse_other_spelling

SPELLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "capitals": ({"method": "Bastion", "model": "D"}, "\"method\": 'Bastion' is unknown"),
    "a typing error": ({"method": "bastoin", "model": "D"}, 'write "bastion"'),
    "no method": ({"model": "D", "bastion_budget": 4}, "no method is named"),
    "another method": ({"method": "dflash", "bastion-top-k": 4}, 'the method is "dflash"'),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_our_keys_without_our_method_are_refused(case: str, pair: tuple[str, str]) -> None:
    given, what = SPELLINGS[case]
    args = EngineArgs(model=pair[0], load_format="dummy", speculative_config=given)
    with pytest.raises(BastionConfigError) as caught:
        args.create_engine_config()
    is_one_sentence(str(caught.value), what, '"bastion"')


def test_another_method_is_left_alone() -> None:
    refuse_other_spelling({"method": "ngram", "num_speculative_tokens": 3})
    refuse_other_spelling({})


WITHOUT_EFFECT: dict[str, Any] = {
    "prompt_lookup_max": 4, "enforce_eager": "yes", "suffix_decoding_max_tree_depth": 12,
    "parallel_drafting": True, "disable_padded_drafter_batch": True, "tensor_parallel_size": 1,
}  # fmt: skip


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_that_does_nothing_is_refused(key: str, pair: tuple[str, str]) -> None:
    is_refused(
        pair, f'"{key}"', "does not work with method", "remove it", **{key: WITHOUT_EFFECT[key]}
    )


def test_the_drafter_is_split_as_the_target_is(pair: tuple[str, str]) -> None:
    assert engine_config(pair, draft_tensor_parallel_size=1) is not None
    is_refused(pair, '"draft_tensor_parallel_size": 2', "remove it", draft_tensor_parallel_size=2)


@pytest.mark.parametrize("key", ["bastion_buget", "bastion_top_k", "bastionbudget"])
def test_a_requests_misspelt_budget_is_refused(key: str) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        check_budget({key: 1}, most=32)
    is_one_sentence(str(refused.value), f'"{key}"', '"bastion_budget"')
