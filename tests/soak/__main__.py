# SPDX-License-Identifier: Apache-2.0
"""Soak tests: random requests for a long time, checked against plain decoding.

    python -m tests.soak --minutes 30             # one engine in this process
    python -m tests.soak --server --minutes 10    # HTTP requests to `vllm serve`

The summary is always written as JSON; the exit status is 1 if something went wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import ROOT, TINY


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scheduling", choices=("async", "sync"), default="async")
    parser.add_argument("--pair", type=Path, default=TINY, help="folder of target and drafter")
    parser.add_argument("--server", action="store_true", help="through vllm serve")
    parser.add_argument(
        "--copying", type=float, default=0.2, help="server: share of prompts that repeat themselves"
    )
    parser.add_argument("--out", type=Path, help="default: build/soak.json, build/soak-server.json")
    options = parser.parse_args()
    out = options.out or ROOT / "build" / ("soak-server.json" if options.server else "soak.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    if options.server:
        from tests.soak import over_http as soak
    else:
        from tests.soak import offline as soak
    summary = soak.run(options)
    out.write_text(json.dumps(summary, indent=1) + "\n")
    lists = ("mismatches", "problems", "near_ties")
    shown = {key: len(value) if key in lists else value for key, value in summary.items()}
    print(json.dumps(shown, indent=1))
    return 0 if soak.passed(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
