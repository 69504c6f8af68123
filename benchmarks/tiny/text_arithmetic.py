# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - the templates read best on one line
"""Generated arithmetic: word problems with answers worked out step by step."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from benchmarks.tiny.words import words

NAMES = words(
    "Mia Tom Ana Ben Lena Omar Sara Paul Nina Alex Rosa Ivan Emma Luca Zoe Hugo Ella Max Ruth Noah "
    "Dina Karl Lily Adam Maya Leo Vera Finn Iris Sam Clara Jonas Tara Felix Aisha Peter Yuki Marco"
)
ITEMS = words(
    "apples pencils stickers marbles books cards shells coins stamps buttons cookies oranges "
    "flowers stones beads balloons ribbons candles tickets badges pears plums bottles boxes"
)
PLACES = words("market shop fair farm school garden library bakery station museum")


def _money(rng: Random) -> str:
    a, b = rng.sample(ITEMS, 2)
    name, n, m = rng.choice(NAMES), rng.randint(2, 9), rng.randint(2, 9)
    p, q = rng.randint(2, 9), rng.randint(2, 9)
    cost_a, cost_b = n * p, m * q
    total = cost_a + cost_b
    paid = total + rng.randint(1, 40)
    return (
        f"Problem: At the {rng.choice(PLACES)}, {name} buys {n} {a} for {p} dollars each and {m} {b} "
        f"for {q} dollars each. {name} pays with {paid} dollars. How much change does {name} get?\n"
        f"Answer: The {a} cost {n} * {p} = {cost_a} dollars. The {b} cost {m} * {q} = {cost_b} "
        f"dollars. Together they cost {cost_a} + {cost_b} = {total} dollars. {name} pays with {paid} "
        f"dollars, so the change is {paid} - {total} = {paid - total} dollars. "
        f"The answer is {paid - total}.\n"
    )


def _give(rng: Random) -> str:
    item, (a, b) = rng.choice(ITEMS), rng.sample(NAMES, 2)
    start, more = rng.randint(12, 60), rng.randint(5, 40)
    have = start + more
    gave = rng.randint(3, have - 3)
    left = have - gave
    verb = rng.choice(["finds", "buys", "wins", "gets"])
    return (
        f"Problem: {a} has {start} {item}. Then {a} {verb} {more} more {item} and gives {gave} of "
        f"them to {b}. How many {item} does {a} have now?\n"
        f"Answer: {a} starts with {start} {item}. After {a} {verb} {more} more, {a} has {start} + "
        f"{more} = {have} {item}. After {a} gives {gave} of them to {b}, {a} has {have} - {gave} = "
        f"{left} {item}. The answer is {left}.\n"
    )


def _share(rng: Random) -> str:
    item, name = rng.choice(ITEMS), rng.choice(NAMES)
    friends, each, bags = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 4)
    total = friends * each * bags
    per_bag = friends * each
    return (
        f"Problem: {name} has {bags} bags with {per_bag} {item} in each bag. {name} shares all the "
        f"{item} equally among {friends} friends. How many {item} does each friend get?\n"
        f"Answer: There are {bags} bags with {per_bag} {item} in each bag, so {name} has {bags} * "
        f"{per_bag} = {total} {item}. They are shared among {friends} friends, so each friend gets "
        f"{total} / {friends} = {total // friends} {item}. The answer is {total // friends}.\n"
    )


def _weeks(rng: Random) -> str:
    item, name = rng.choice(ITEMS), rng.choice(NAMES)
    day, days, extra = rng.randint(2, 12), rng.randint(3, 7), rng.randint(5, 30)
    made = day * days
    word = rng.choice(["makes", "sells", "packs", "paints", "collects"])
    return (
        f"Problem: Every day {name} {word} {day} {item}. On the last day {name} {word} {extra} extra "
        f"{item}. How many {item} are that after {days} days?\n"
        f"Answer: In {days} days {name} {word} {day} * {days} = {made} {item}. With the {extra} extra "
        f"{item} of the last day that makes {made} + {extra} = {made + extra} {item}. "
        f"The answer is {made + extra}.\n"
    )


def _compare(rng: Random) -> str:
    item, (a, b, c) = rng.choice(ITEMS), rng.sample(NAMES, 3)
    first, more, times = rng.randint(3, 20), rng.randint(2, 15), rng.randint(2, 4)
    second = first + more
    third = second * times
    total = first + second + third
    return (
        f"Problem: {a} has {first} {item}. {b} has {more} more {item} than {a}, and {c} has {times} "
        f"times as many {item} as {b}. How many {item} do they have together?\n"
        f"Answer: {a} has {first} {item}. {b} has {first} + {more} = {second} {item}. {c} has "
        f"{times} * {second} = {third} {item}. Together they have {first} + {second} + {third} = "
        f"{total} {item}. The answer is {total}.\n"
    )


def _distance(rng: Random) -> str:
    name, hours, speed = rng.choice(NAMES), rng.randint(2, 6), rng.randint(3, 30)
    more, place = rng.randint(2, 25), rng.choice(PLACES)
    way = hours * speed
    return (
        f"Problem: {name} rides for {hours} hours at {speed} km per hour and then walks {more} km to "
        f"the {place}. {name} goes back the same way. How many km is that in all?\n"
        f"Answer: In {hours} hours {name} rides {hours} * {speed} = {way} km. With the walk of {more} "
        f"km to the {place} that is {way} + {more} = {way + more} km. There and back is 2 * "
        f"{way + more} = {2 * (way + more)} km. The answer is {2 * (way + more)}.\n"
    )


def _rows(rng: Random) -> str:
    item, place = rng.choice(ITEMS), rng.choice(PLACES)
    rows, each, broken = rng.randint(3, 9), rng.randint(4, 12), rng.randint(2, 9)
    total = rows * each
    return (
        f"Problem: In the {place} there are {rows} rows of {each} {item}. {broken} of the {item} are "
        f"broken and a quarter of the good ones are not needed, rounded down. How many {item} are "
        f"used?\n"
        f"Answer: There are {rows} * {each} = {total} {item}. Without the {broken} broken ones there "
        f"are {total} - {broken} = {total - broken} {item}. A quarter of {total - broken} is "
        f"{(total - broken) // 4}, so {total - broken} - {(total - broken) // 4} = "
        f"{total - broken - (total - broken) // 4} {item} are used. "
        f"The answer is {total - broken - (total - broken) // 4}.\n"
    )


KINDS: tuple[Callable[[Random], str], ...] = (
    _money, _give, _share, _weeks, _compare, _distance, _rows,
)  # fmt: skip


def document(rng: Random) -> str:
    return "\n".join(rng.choice(KINDS)(rng) for _ in range(3))
