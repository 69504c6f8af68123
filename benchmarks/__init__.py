# SPDX-License-Identifier: Apache-2.0
"""How the published numbers are made. A package, because a folder without this file would lose
against any installed top-level package that is called `benchmarks` too."""
