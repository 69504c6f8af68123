# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.widen`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import benchmarks.widen
from benchmarks import parser_of
from benchmarks.widen.pairs import drafter_of, pair_of
from benchmarks.widen.widening import SHAPES, Shape


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(benchmarks.widen.__doc__)
    parser.add_argument("name", nargs="?", choices=SHAPES, help="a known shape")
    parser.add_argument(
        "--config", type=Path, help="a Qwen3-like config.json; its stem is the name"
    )
    parser.add_argument(
        "--drafters", nargs="*", default=[], choices=("dflash2",), help="further drafters"
    )
    given = parser.parse_args(argv)
    if (given.name is None) == (given.config is None):
        parser.error("give a shape's name, or --config")
    name = given.name or given.config.stem
    if given.drafters and given.name is None:
        parser.error("--drafters needs the name of a shape")
    shape = Shape.from_config(json.loads(given.config.read_text())) if given.config else None
    try:
        folder = pair_of(name, shape)
        for kind in given.drafters:
            drafter_of(given.name, kind)
    except ValueError as error:
        parser.error(str(error))
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
