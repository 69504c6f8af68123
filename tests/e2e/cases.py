# SPDX-License-Identifier: Apache-2.0
"""The batches that engines are compared on, built from the held-out prompts."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

from tokenizers import Tokenizer

from tests.e2e.engines import ON_GPU, PAIR, Batch

DOMAINS = ("code", "arithmetic", "chat")
# A JSON schema whose texts are bounded.
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [7, 44]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
    {"temperature": 1.0},
)
if ON_GPU:  # no filters: rounding also moves their cut-off, which is no near-tie
    _SAMPLING = ({"temperature": 0.8}, {"temperature": 1.0})
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.6, "logprobs": 2},
    "repetition": {"repetition_penalty": 1.3},
    "rewards": {"repetition_penalty": 0.8, "frequency_penalty": -0.3},
    "bad-words": {"bad_words": ["the", "return", "=", " a", "in the"]},
    "min-tokens": {"min_tokens": 20, "stop": ["e"], "stop_token_ids": list(range(2, 30))},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "allowed": {"allowed_token_ids": list(range(2, 600)), "logprobs": 0},
    "bias": {"logit_bias": {str(token): 2.0 for token in range(60, 90)}},
    "min-p": {"min_p": 0.2, "logprobs": 1},
    "everything": {
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "bad_words": ["return", "of the"],
        "min_tokens": 12, "logprobs": 1, "top_p": 0.9, "min_p": 0.05,
        "logit_bias": {"70": 1.5, "300": -4.0},
    },
}  # fmt: skip
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"structured_outputs": {"json": PERSON}},
    "regex": {"structured_outputs": {"regex": r"[a-z ]{20,40}(\.[0-9]{1,3};)?"}},
    "choice": {"structured_outputs": {"choice": ["one apple and a half", "two pears", "none"]}},
    "penalised": {"structured_outputs": {"regex": r"[a-z ]{8,30}"}, "presence_penalty": 0.8},
    "scored": {"structured_outputs": {"json": PERSON}, "logprobs": 2},
}


@functools.cache
def prompts() -> dict[str, list[str]]:
    """The held-out prompts of every domain, alternating between the kinds of a domain."""
    out: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    for line in (PAIR / "prompts.jsonl").read_text().splitlines():
        row = json.loads(line)
        out[row["domain"]].append(row["prompt"])
    for texts in out.values():
        half = len(texts) // 2
        texts[:] = [text for two in zip(texts[:half], texts[half:], strict=False) for text in two]
    return out


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))


def words() -> list[int]:
    """All tokens except long blanks."""
    texts = [_tokenizer().decode([token]) for token in range(_tokenizer().get_vocab_size())]
    return [token for token, text in enumerate(texts) if text.strip() or text in ("\n", " ")]


def some(per_domain: int, first: int = 0) -> list[tuple[str, str]]:
    """Pairs (name, text), `per_domain` of each domain, alternating between domains."""
    numbers = range(first, first + per_domain)
    return [(f"{domain}{i}", prompts()[domain][i]) for i in numbers for domain in DOMAINS]


def long_prompt(domain: str, tokens: int) -> list[int]:
    """The first token ids of a domain's concatenated held-out prompts."""
    return _tokenizer().encode("\n".join(prompts()[domain])).ids[:tokens]


def drawn(i: int, every: int = 2, temperature: float = 1.0) -> dict[str, Any]:
    """Parameters of request number i: every so many sample, with the seed i."""
    sampled = i % every == every - 1
    return {"temperature": temperature, "seed": i} if sampled else {"temperature": 0}


def texts(
    case: str, per_domain: int, first: int = 0, every: int = 0, prefix: str = "", **params: Any
) -> Batch:
    """`some` texts at T=0; with `every`, each so many samples at T=1 or `params`' temperature."""
    batch, temperature = Batch(case), params.pop("temperature", 1.0)
    for i, (name, text) in enumerate(some(per_domain, first)):
        sampling = drawn(i, every, temperature) if every else {"temperature": 0}
        batch.add(prefix + name, text, **(sampling | params))
    return batch


def greedy(per_domain: int, tokens: int = 64) -> Batch:
    return texts(f"T=0, {tokens} tokens", per_domain, prefix="greedy-", max_tokens=tokens)


def sampled(count: int, tokens: int = 64) -> Batch:
    """T=0.8 and T=1, plain and with top-p and top-k, a seed per request."""
    batch = Batch("T=0.8 and T=1, top-p, top-k, seeds")
    for i, (name, text) in enumerate(some(count // 3)):
        params = _SAMPLING[i % len(_SAMPLING)]
        batch.add(f"sampled-{name}", text, max_tokens=tokens, seed=1000 + i, **params)
    return batch


def chunked() -> Batch:
    """Prompts longer than a step's 128 tokens, prefilled while others decode."""
    batch = Batch("prompts longer than a prefill chunk")
    batch.add("chunked-short", prompts()["code"][0], temperature=0, max_tokens=40, ignore_eos=True)
    for i, domain in enumerate(DOMAINS):
        prompt = long_prompt(domain, 150 + 60 * i)
        temperature = float(domain == "chat")
        batch.add(f"chunked-{domain}", prompt, arrive=4 * i, max_tokens=24,
                  temperature=temperature, seed=5)  # fmt: skip
    return batch


def stops() -> Batch:
    """Stop strings, stop tokens and token limits, reached at any point of a path."""
    batch = Batch("stop strings and max_tokens inside a path")
    strings = {"code": ["):", "\n ", "("], "arithmetic": ["So", "="], "chat": [".", "ou"]}
    for domain, found in strings.items():
        for i, text in enumerate(found):
            prompt = prompts()[domain][i]
            batch.add(f"stop-{domain}{i}", prompt, temperature=0, max_tokens=48, stop=[text])
    batch.add("stop-kept", prompts()["chat"][3], temperature=0, max_tokens=48, stop=[" "],
              include_stop_str_in_output=True)  # fmt: skip
    batch.add("stop-token", prompts()["code"][3], temperature=0, max_tokens=48,
              stop_token_ids=list(range(2, 40)))  # fmt: skip
    for tokens in (1, 2, 3, 5, 7, 10, 13, 18):
        domain = DOMAINS[tokens % 3]
        batch.add(f"limit-{tokens}", prompts()[domain][4], temperature=0, max_tokens=tokens,
                  ignore_eos=True)  # fmt: skip
    return batch


def context_end(max_model_len: int) -> Batch:
    """Contexts that reach max_model_len; the last steps have less room than a tree's depth."""
    batch = Batch("context ends at max_model_len")
    for i, domain in enumerate(DOMAINS):
        prompt = long_prompt(domain, max_model_len - 70 - 5 * i)
        temperature = float(domain == "code")
        batch.add(f"end-{domain}", prompt, temperature=temperature, seed=i,
                  max_tokens=max_model_len, ignore_eos=True)  # fmt: skip
    return batch


def prefix_cache() -> list[Batch]:
    """A cold batch, then prompts that continue it: prefix hits on blocks filled by decoding."""
    cold, warm = Batch("prefix cache, cold"), Batch("prefix cache, warm")
    for name, text in some(1, first=6):
        cold.add(f"cold-{name}", text, temperature=0, max_tokens=80, ignore_eos=True)
        warm.add(f"warm-{name}", "", temperature=0, max_tokens=32,
                 follow={"id": f"cold-{name}", "tokens": 72})  # fmt: skip
    return [cold, warm]


def aborted() -> Batch:
    """A request that is aborted while others decode, and requests that arrive late."""
    batch = Batch("aborted and late requests")
    for i, (name, text) in enumerate(some(2, first=8)):
        more = {"abort_after": 9} if i in (1, 3) else {"arrive": 3 * i}
        batch.add(f"abort-{name}", text, temperature=0, max_tokens=40, ignore_eos=True, **more)
    return batch


def wishes(
    case: str, kinds: dict[str, dict[str, Any]], texts: list[tuple[str, str]], tokens: int = 32
) -> Batch:
    """Every kind at T=0 and, seeded, at T=0.8, on alternating prompts."""
    batch = Batch(case)
    samplings = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
    for at, (kind, sampling) in enumerate(itertools.product(kinds, samplings)):
        name, text = texts[at % len(texts)]
        params = {"max_tokens": tokens, **sampling, **kinds[kind]}
        batch.add(f"{kind}-{at}-{name}", text, **params)
    return batch
