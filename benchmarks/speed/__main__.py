# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.speed`."""

# Engines' processes import this file, and those without the plugin must not import it.
if __name__ == "__main__":
    from benchmarks.speed.run import main

    raise SystemExit(main())
