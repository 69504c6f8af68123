# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.gpu.quarter`."""

from benchmarks.gpu.quarter.main import main

if __name__ == "__main__":
    raise SystemExit(main())
