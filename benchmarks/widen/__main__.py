# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.widen`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks.widen
from benchmarks.widen.pairs import drafter_of, pair_of
from benchmarks.widen.widening import SHAPES, Shape


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=benchmarks.widen.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=SHAPES, help="a known shape")
    parser.add_argument(
        "--config", type=Path, help="a Qwen3-like config.json; its stem is the name"
    )
    parser.add_argument("--keep-vocabulary", action="store_true", help="the tiny pair's 1,024")
    parser.add_argument("--drafter-layers", type=int, help="default 5, as published")
    parser.add_argument(
        "--drafters", nargs="*", default=[], choices=("dflash2", "domino"), help="further drafters"
    )
    parser.add_argument("--again", action="store_true", help="write it even if it exists")
    given = parser.parse_args(argv)
    if (given.name is None) == (given.config is None):
        parser.error("give a shape's name, or --config")
    name = given.name or given.config.stem
    if given.drafters and given.name is None:
        parser.error("--drafters needs the name of a shape")
    try:
        folder = pair_of(
            name,
            Shape.from_config(_read(given.config)) if given.config else None,
            keep_vocabulary=given.keep_vocabulary,
            drafter_layers=given.drafter_layers,
            again=given.again,
        )
        for kind in given.drafters:
            drafter_of(given.name, kind)
    except ValueError as error:
        parser.error(str(error))
    checks = _read(folder / "pair.json")["check"]
    checks |= {kind: _read(folder / f"{kind}.json")["check"] for kind in given.drafters}
    for kind, result in checks.items():
        print(
            f"{kind}: {result['equal_argmax']} of {result['positions']} argmaxes equal, logits "
            f"within {result['largest_difference']:.3f} of {result['largest_logit']:.1f}"
        )
    print(folder)
    return 0


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


if __name__ == "__main__":
    raise SystemExit(main())
