# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.e2e`."""

# Engines' processes import this file, and those without the plugin must not import it.
if __name__ == "__main__":
    from benchmarks.e2e.main import main

    raise SystemExit(main())
