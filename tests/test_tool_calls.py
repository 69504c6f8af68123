# SPDX-License-Identifier: Apache-2.0
"""What a streamed tool call looks like when its tokens arrive several at a time.

vLLM's parsers are fed what each engine step has emitted: one token in plain decoding, several with
any speculative method.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers import get_tokenizer

from tests.e2e.engines import TARGET

_CALL = '<tool_call>\n{"name": "find", "arguments": {"name": "Ada", "age": 7}}\n</tool_call>'
_REQUEST = ChatCompletionRequest(
    model="any",
    messages=[{"role": "user", "content": "Who is it?"}],
    tools=[{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}],
    tool_choice="auto",
    stream=True,
)


def streamed(tokens: Sequence[int], steps: Sequence[int]) -> tuple[str, str]:
    """Name and arguments that a client puts together; `steps` are the tokens of each step."""
    tokenizer = get_tokenizer(TARGET)
    parser_class = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
    assert parser_class is not None
    parser = parser_class(tokenizer, _REQUEST.tools)
    name, arguments, at = "", "", 0
    for count in steps:
        chunk, at = list(tokens[at : at + count]), at + count
        delta = parser.parse_delta(
            tokenizer.decode(chunk), chunk, _REQUEST, [], finished=at == len(tokens)
        )
        for call in (delta.tool_calls if delta else None) or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert at == len(tokens)
    return name, arguments


def test_a_call_that_ends_is_the_same_however_many_tokens_a_step_has() -> None:
    tokens = get_tokenizer(TARGET).encode(_CALL, add_special_tokens=False)
    for size in (1, 2, 3, 5, 8):
        steps = [min(size, len(tokens) - at) for at in range(0, len(tokens), size)]
        assert streamed(tokens, steps) == ("find", '{"name": "Ada", "age": 7}')


def test_a_call_that_max_tokens_cuts_depends_on_the_last_step() -> None:
    """vLLM closes the arguments only if the name is in the last step's tokens.

    The ids are the same, so this is no fault of a method's tokens.
    """
    cut = _CALL[: _CALL.index("arguments")]
    tokens = get_tokenizer(TARGET).encode(cut, add_special_tokens=False)
    one_by_one = [1] * len(tokens)
    assert streamed(tokens, one_by_one) == ("find", "")
    assert streamed(tokens, [len(tokens) - 1, 1]) == ("find", "")
    assert streamed(tokens, [len(tokens)]) == ("find", "{}")
