# SPDX-License-Identifier: Apache-2.0
"""How this project's published numbers are made."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "benchmarks" / "tiny"
RESULTS = ROOT / "benchmarks" / "results"


def parser_of(text: str) -> argparse.ArgumentParser:
    """The parser of the command that this process runs; its help begins with the text as it is."""
    spec = sys.modules["__main__"].__spec__
    prog = None if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog, description=text, formatter_class=raw)
