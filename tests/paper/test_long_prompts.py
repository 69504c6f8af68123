# SPDX-License-Identifier: Apache-2.0
"""The texts of `benchmarks.paper.prompts passages`."""

from __future__ import annotations

from transformers import AutoTokenizer

from benchmarks import TINY
from benchmarks.paper.prompts import passage, passages


def test_prompts_share_their_passages_and_end_with_a_piece_of_an_early_one() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    longest, _ = passage(tokenizer, 3000, 0)
    ends = set()
    for length in (600, 3000):
        for number in range(6):
            ids, rest = passage(tokenizer, length, number)
            assert len(ids) == length and ids[:-40] == longest[: length - 40]
            piece = tuple(ids[-24:])
            found = [at for at in range(length - 24) if tuple(ids[at : at + 24]) == piece]
            # It stands in the first quarter of the passages, and the text goes on there.
            assert found and found[0] < max(600, length // 4)
            assert ids[found[0] + 24 : found[0] + 48] == rest[:24]
            ends.add((length, piece))
    assert len(ends) == 2 * 6
    for row in passages([600], 2):
        assert row["category"] == "600 tokens"
        assert abs(len(tokenizer(row["prompt"])["input_ids"]) - 600) <= 2
