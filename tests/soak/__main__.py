# SPDX-License-Identifier: Apache-2.0
"""A soak test: random HTTP requests to `vllm serve`, checked against plain decoding.

    python -m tests.soak --minutes 30

The summary is always written as JSON; the exit status is 1 if something went wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import ROOT, TINY
from tests.soak import over_http


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pair", type=Path, default=TINY, help="folder of target and drafter")
    parser.add_argument(
        "--copying", type=float, default=0.2, help="share of prompts that repeat themselves"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak.json")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    summary = over_http.run(options)
    options.out.write_text(json.dumps(summary, indent=1) + "\n")
    lists = ("problems", "near_ties")
    shown = {key: len(value) if key in lists else value for key, value in summary.items()}
    print(json.dumps(shown, indent=1))
    return 0 if over_http.passed(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
