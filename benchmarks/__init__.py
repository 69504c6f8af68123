# SPDX-License-Identifier: Apache-2.0
"""How this project's published numbers are made."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "benchmarks" / "tiny"
RESULTS = ROOT / "benchmarks" / "results"
