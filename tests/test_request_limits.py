# SPDX-License-Identifier: Apache-2.0
"""What V2's tables cannot hold is refused in the front end, exactly where the worker would raise.

Every request is given to `check_tables` and to vLLM's own sampler state, which must agree.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # vLLM's substitutes for pinned memory and events; they must come before its GPU modules.
    import vllm.v1.worker.cpu.shm  # noqa: F401
from vllm.config import SpeculativeConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_bastion import plugin
from vllm_bastion.config import BastionSpeculativeConfig
from vllm_bastion.hooks import requests

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's state on the host")
CPU = torch.device("cpu")


def _params(words: list[list[int]] | None = None, **given: Any) -> SamplingParams:
    params = SamplingParams(**({"max_tokens": 16} | given))
    if words is not None:  # made by the tokenizer in service
        params._bad_words_token_ids = words
    return params


def _stops(count: int, min_tokens: int) -> SamplingParams:
    """`count` stop tokens, the last of them the model's own."""
    params = _params(stop_token_ids=list(range(count - 1)), min_tokens=min_tokens)
    params.update_from_generation_config({}, eos_token_id=count - 1)
    return params


FITS = {
    "allowed_token_ids": _params(allowed_token_ids=list(range(1024))),
    "logit_bias": _params(logit_bias=dict.fromkeys(range(1024), 1.0)),
    "stop_token_ids": _stops(128, 1), "stop_token_ids without min_tokens": _stops(400, 0),
    "bad_words": _params([[1]] * 128), "bad_words' tokens": _params([[1] * 8] * 128),
}  # fmt: skip
TOO_LARGE = {
    "allowed_token_ids": _params(allowed_token_ids=list(range(1025))),
    "logit_bias": _params(logit_bias=dict.fromkeys(range(1025), 1.0)),
    "stop_token_ids": _stops(129, 1),
    "bad_words": _params([[1]] * 129),
    "bad_words have": _params([[1] * 8] * 127 + [[1] * 9]),
}
PROMPT = [1, 2, 3]


def admit(params: SamplingParams) -> None:
    """What V2's worker does with a new request."""
    states = RequestState(2, 64, 64, 4, 2048, CPU)
    sampler = Sampler(SimpleNamespace(reasoning_config=None), 2, 2048, CPU, states)
    states.add_request("a", len(PROMPT), PROMPT, 0, params.max_tokens)
    sampler.add_request(states.req_id_to_index["a"], params)


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_accepted(name: str) -> None:
    admit(FITS[name])
    requests.check_tables(FITS[name])


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_the_worker_would_raise_on_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        admit(TOO_LARGE[name])
    with pytest.raises(VLLMValidationError, match=name):
        requests.check_tables(TOO_LARGE[name])


@pytest.mark.parametrize("given", [{"min_p": 0.2}, {"logit_bias": {3: 1.0}}])
def test_trees_take_what_vllm_refuses_with_other_methods(given: dict[str, Any]) -> None:
    plugin.register()
    params = SamplingParams(**given)
    params._validate_spec_decode(object.__new__(BastionSpeculativeConfig))
    params._validate_spec_decode(None)
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative"):
        params._validate_spec_decode(object.__new__(SpeculativeConfig))


def test_streaming_input_sessions_are_refused_in_one_sentence() -> None:
    """Other methods' are vLLM's own affair."""
    ours = SimpleNamespace(speculative_config=object.__new__(BastionSpeculativeConfig))
    made = SimpleNamespace(sampling_params=None)
    for config in (ours, SimpleNamespace(speculative_config=None)):
        processor = SimpleNamespace(vllm_config=config)
        assert requests.process_inputs(lambda *_, **__: made, processor, resumable=False) is made
    assert requests.process_inputs(lambda *_, **__: made, processor, resumable=True) is made
    processor = SimpleNamespace(vllm_config=ours)
    with pytest.raises(VLLMValidationError, match="sessions are not served with method"):
        requests.process_inputs(lambda *_, **__: made, processor, resumable=True)
