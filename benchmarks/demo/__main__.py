# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.demo`."""

# Engines' processes import this file: nothing of ours belongs into those that run without us.
if __name__ == "__main__":
    from benchmarks.demo.run import main

    raise SystemExit(main())
