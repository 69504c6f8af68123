# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: compile the C++ kernels with every check, and with AMX tiles in software.

    python -m pytest -p tests.kernels.checked_build tests/kernels/test_tree_attention_cpu.py

Every index is checked against the sizes that are handed over, and undefined behaviour ends the
process. Slow, so `test_cpu_library.py` runs it in a process of its own.
"""

from __future__ import annotations


def pytest_collection_finish() -> None:
    # Not earlier: conftest.py sets Triton's mode before anything imports the ops.
    from bastion_kernels.cpu import library

    library._FLAGS += (
        "-DBASTION_CHECK", "-DBASTION_EMULATE_TILES", "-O1", "-fsanitize=undefined",
        "-fno-sanitize-recover=undefined",
    )  # fmt: skip
    library._load.cache_clear()
    library.has_tiles.cache_clear()
