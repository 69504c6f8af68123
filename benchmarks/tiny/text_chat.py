# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - the templates read best on one line
"""Generated dialogue: a grammar with many free choices, so that it stays hard to guess."""

from __future__ import annotations

import re
from random import Random

from benchmarks.tiny.words import words

NAMES = words(
    "Mia Tom Ana Ben Lena Omar Sara Paul Nina Alex Rosa Ivan Emma Luca Zoe Hugo Ella Max Ruth Noah "
    "Dina Karl Lily Adam Maya Leo Vera Finn Iris Sam"
)

# Every <symbol> is replaced by one of its lines, until none is left. <name> and <topic words> are
# drawn once for a dialogue, so that later turns can refer back to them.
GRAMMAR: dict[str, list[str]] = {
    "hello": ["Hi", "Hello", "Hey there", "Good morning", "Good evening", "Hi again"],
    "ask": [
        "could you help me <task>?", "I want to <task>. Where do I start?",
        "I am trying to <task>, but I am not sure how.", "what is a good way to <task>?",
        "my friend <name> told me to <task>. What do you think?",
        "do you have any tips? I would like to <task>.", "how long does it take to <task>?",
    ],
    "task": [
        "cook <dish> for <number> people", "plan a <adj> trip to <city>", "learn to play the <tool>",
        "pick a <adj> book about <subject>", "choose a <adj> present for <name>",
        "train my <animal> before <day>", "grow <plant> on my balcony", "sleep better on <day>",
        "write a <adj> letter to <name>", "save money for a <tool>", "paint my <room> <colour>",
        "get from <city> to <city> by <vehicle>", "prepare for a talk about <subject>",
    ],
    "dish": ["lentil soup", "mushroom risotto", "apple cake", "vegetable curry", "fish pie",
             "pancakes", "tomato pasta", "onion tart", "fried rice", "bean salad"],
    "adj": ["short", "cheap", "quiet", "funny", "simple", "warm", "friendly", "useful", "small",
            "colourful", "thoughtful", "easy"],
    "city": ["Lisbon", "Vienna", "Oslo", "Kyoto", "Porto", "Dublin", "Prague", "Quito", "Naples",
             "Tallinn", "Seville", "Bergen"],
    "tool": ["guitar", "piano", "flute", "drums", "camera", "bicycle", "violin", "telescope"],
    "subject": ["history", "birds", "space", "the sea", "old maps", "chess", "trains", "medicine",
                "music", "volcanoes", "robots"],
    "animal": ["dog", "cat", "parrot", "pony", "rabbit", "puppy"],
    "plant": ["basil", "tomatoes", "mint", "roses", "peppers", "strawberries"],
    "room": ["kitchen", "bedroom", "hall", "bathroom", "office", "garage"],
    "colour": ["blue", "green", "white", "yellow", "grey", "orange"],
    "vehicle": ["train", "bus", "car", "boat", "bicycle"],
    "number": ["two", "three", "four", "five", "six", "eight", "ten"],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "time": ["early in the morning", "after lunch", "in the evening", "twice a week",
             "for ten minutes a day", "at the weekend", "before dinner"],
    "open": [
        "Of course!", "Sure, <name>.", "That sounds <adj>.", "Good question.", "Gladly!",
        "What a <adj> idea!", "Happy to help, <name>.", "I can help with that.",
    ],
    "first": [
        "First, decide how much time you have", "Start with something <adj>",
        "I would begin <time>", "The <adj> way is to ask <name>",
        "Make a list of what you need", "Look for a <adj> course in <city>",
        "Many people start on a <day>", "Try it <time> and see how it feels",
    ],
    "then": [
        "Then keep it <adj> and do not rush", "After that, practise <time>",
        "Next, tell <name> about your plan", "Then set aside <number> hours on <day>",
        "It also helps to read about <subject>", "You may need a <adj> place in the <room>",
        "Later you can add something <colour>", "A walk with the <animal> clears the head",
    ],
    "close": [
        "Would you like a plan for <day>?", "Shall I write down <number> more ideas?",
        "Do you prefer something <adj> or something <adj>?", "Let me know how it goes!",
        "Is <name> going to join you?", "Have fun, and say hello to <name>!",
        "Does <day> work for you?",
    ],
    "reply": ["<open> <first>. <then>. <close>", "<open> <first>. <first>. <close>",
              "<first>. <then>. <then>. <close>", "<open> <first>. <then>."],
    "more": [
        "Thanks! And what if I only have until <day>?", "Yes, please. I have <number> hours <time>.",
        "I think <name> would like something <adj>.", "Hmm, I would rather do it <time>.",
        "Not really. I was in <city> last <day> and it was not <adj>.",
        "That helps. Can my <animal> come too?", "Great, and which <tool> is the most <adj>?",
        "Okay, but the <room> is too <adj> for that.", "No, <name> is busy on <day>.",
    ],
}  # fmt: skip
_SYMBOL = re.compile(r"<(\w+)>")


def _expand(text: str, rng: Random, fixed: dict[str, str]) -> str:
    while match := _SYMBOL.search(text):
        symbol = match.group(1)
        # A name or an adjective already in the dialogue comes back half of the time.
        if symbol in fixed and rng.random() < 0.5:
            choice = fixed[symbol]
        else:
            choice = rng.choice(NAMES if symbol == "name" else GRAMMAR[symbol])
            if symbol in ("name", "adj", "day"):
                fixed[symbol] = choice
        text = text[: match.start()] + choice + text[match.end() :]
    return text


def document(rng: Random) -> str:
    fixed: dict[str, str] = {}
    out = []
    for i in range(rng.randint(4, 6)):
        user = _expand("<hello>, <ask>" if i == 0 else "<more>", rng, fixed)
        out.append(f"User: {user}\nAssistant: {_expand('<reply>', rng, fixed)}\n")
    return "".join(out)
