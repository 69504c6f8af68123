# SPDX-License-Identifier: Apache-2.0
"""`vllm-bastion calibrate`: start an engine, which measures itself, and store the profile."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm.v1.engine.llm_engine import LLMEngine

from vllm_bastion.cli.arguments import engine_arguments
from vllm_bastion.policy.cost.store import (
    WRITE,
    Profile,
    profile_path,
    read_profile,
    write_profile,
)


def calibrate(
    target: str, drafter: str, output: Path | None, options: Sequence[str]
) -> tuple[Profile, Path]:
    """Measure a pair. Returns the profile, and the file that it was written to.

    output: file to write; None for the cache. options: vLLM's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "profile.json"
        args = engine_arguments(
            "calibrate", target, drafter, options, bastion_calibration=f"{WRITE}{fresh}"
        )
        engine = LLMEngine.from_engine_args(args)
        profile = read_profile(fresh)
        engine.engine_core.shutdown()
    path = output or profile_path(profile.key)
    write_profile(profile, path)
    return profile, path
