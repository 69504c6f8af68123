# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - the templates read best on one line
"""Generated Python: the plain functions, classes and tests that fill ordinary code bases."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from benchmarks.tiny.words import words

NOUNS = words(
    "user order item page record event client account token node edge path row column field entry "
    "message request session ticket invoice product sensor device worker task job batch report "
    "image frame block chunk query filter rule group member price stock branch version label"
)
ATTRS = words(
    "name size count total price weight height width status level index start end limit score "
    "rank owner title value kind color speed offset length depth rate code key"
)
VERBS = words("update remove insert validate render parse collect merge split load store count")


def _cap(word: str) -> str:
    return word.capitalize()


def _class(rng: Random) -> str:
    noun = rng.choice(NOUNS)
    attrs = rng.sample(ATTRS, rng.randint(2, 4))
    base = rng.choice(["", "", "(Base)", "(object)"])
    name = _cap(noun) + rng.choice(["", "", "List", "Info", "Data", "Error", "Model", "View"])
    lines = [f"class {name}{base}:", ""]
    lines += [f"    def __init__(self, {', '.join(attrs)}):"]
    lines += [f"        self.{a} = {a}" for a in attrs]
    lines += ["", "    def __repr__(self):"]
    body = ", ".join(f"{a}={{self.{a}}}" for a in attrs)
    lines += [f"        return f'{name}({body})'"]
    lines += ["", "    def __eq__(self, other):"]
    lines += ["        return " + " and ".join(f"self.{a} == other.{a}" for a in attrs)]
    for a in rng.sample(attrs, rng.randint(1, len(attrs))):
        lines += ["", f"    def get_{a}(self):", f"        return self.{a}"]
        if rng.random() < 0.6:
            lines += ["", f"    def set_{a}(self, {a}):", f"        self.{a} = {a}"]
    return "\n".join(lines) + "\n"


def _loop(rng: Random) -> str:
    noun, attr, verb = rng.choice(NOUNS), rng.choice(ATTRS), rng.choice(VERBS)
    limit, test = rng.choice(ATTRS), rng.choice(["<", ">", "<=", ">=", "==", "!="])
    if limit == attr:
        limit = "limit" if attr != "limit" else "bound"
    return rng.choice([
        f"def {verb}_{noun}s({noun}s, {limit}):\n    result = []\n    for {noun} in {noun}s:\n"
        f"        if {noun}.{attr} {test} {limit}:\n            result.append({noun})\n"
        f"    return result\n",
        f"def total_{attr}({noun}s):\n    total = 0\n    for {noun} in {noun}s:\n"
        f"        total += {noun}.{attr}\n    return total\n",
        f"def {verb}_{noun}_by_{attr}({noun}s):\n    groups = {{}}\n    for {noun} in {noun}s:\n"
        f"        key = {noun}.{attr}\n        if key not in groups:\n            groups[key] = []\n"
        f"        groups[key].append({noun})\n    return groups\n",
        f"def {verb}_{noun}({noun}, {limit}=None):\n    if {limit} is None:\n"
        f"        {limit} = {noun}.{attr}\n    if {limit} {test} 0:\n"
        f"        raise ValueError('{limit} of {noun} must not be ' + str({limit}))\n"
        f"    {noun}.{attr} = {limit}\n    return {noun}\n",
        f"def find_{noun}({noun}s, {attr}):\n    for i, {noun} in enumerate({noun}s):\n"
        f"        if {noun}.{attr} == {attr}:\n            return i\n    return -1\n",
        f"def max_{attr}({noun}s):\n    best = None\n    for {noun} in {noun}s:\n"
        f"        if best is None or {noun}.{attr} > best.{attr}:\n            best = {noun}\n"
        f"    return best\n",
    ])  # fmt: skip


def _tests(rng: Random) -> str:
    noun, attrs = rng.choice(NOUNS), rng.sample(ATTRS, 3)
    lines = [f"class Test{_cap(noun)}(unittest.TestCase):", "", "    def setUp(self):"]
    values = [rng.randint(1, 99) for _ in attrs]
    args = ", ".join(f"{a}={v}" for a, v in zip(attrs, values, strict=True))
    lines += [f"        self.{noun} = {_cap(noun)}({args})"]
    for a, v in zip(attrs, values, strict=True):
        lines += ["", f"    def test_{a}(self):", f"        self.assertEqual(self.{noun}.{a}, {v})"]
        if rng.random() < 0.5:
            lines += [f"        self.{noun}.{a} += 1"]
            lines += [f"        self.assertEqual(self.{noun}.{a}, {v + 1})"]
        if rng.random() < 0.3:
            lines += ["        with self.assertRaises(TypeError):"]
            lines += [f"            self.{noun}.{a}()"]
    return "\n".join(lines) + "\n"


def _main(rng: Random) -> str:
    noun, attrs = rng.choice(NOUNS), rng.sample(ATTRS, rng.randint(2, 4))
    lines = [
        "def main():",
        f"    parser = argparse.ArgumentParser(description='Print the {noun}s')",
    ]
    for a in attrs:
        kind = rng.choice(
            ["type=int, default=" + str(rng.randint(0, 20)), "type=str", "type=float"]
        )
        lines += [f"    parser.add_argument('--{a}', {kind}, help='{a} of the {noun}')"]
    lines += ["    args = parser.parse_args()"]
    lines += [f"    {noun} = {_cap(noun)}({', '.join(f'{a}=args.{a}' for a in attrs)})"]
    lines += [f"    print({noun})", "", "if __name__ == '__main__':", "    main()"]
    return "\n".join(lines) + "\n"


def _convert(rng: Random) -> str:
    noun, attrs = rng.choice(NOUNS), rng.sample(ATTRS, rng.randint(2, 4))
    lines = [f"def {noun}_to_dict({noun}):", "    return {"]
    lines += [f"        '{a}': {noun}.{a}," for a in attrs]
    lines += ["    }", "", f"def {noun}_from_dict(data):", f"    {noun} = {_cap(noun)}()"]
    lines += [f"    {noun}.{a} = data['{a}']" for a in attrs]
    lines += [f"    return {noun}"]
    return "\n".join(lines) + "\n"


KINDS: tuple[Callable[[Random], str], ...] = (_class, _class, _loop, _loop, _tests, _main, _convert)


def document(rng: Random) -> str:
    return "\n".join(rng.choice(KINDS)(rng) for _ in range(rng.randint(3, 5)))
