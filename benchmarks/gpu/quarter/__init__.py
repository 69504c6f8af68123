# SPDX-License-Identifier: Apache-2.0
"""A quarter of an hour on a GPU: eight questions, each result written as it comes, and a page.

    python -m benchmarks.gpu.quarter --seconds 430        # asks until then
    python -m benchmarks.gpu.quarter --seconds 330        # goes on with what is missing
    python -m benchmarks.gpu.quarter --list               # the questions, without a GPU
    python -m benchmarks.gpu.quarter --page               # writes the page anew, without a GPU
    python -m benchmarks.gpu.quarter --only tokens ops    # these alone

Each question is asked in a process of its own, with a limit of time, and nothing runs beside one
that is timed. A process that reaches its limit is interrupted and leaves a trace. The next call
skips what has been answered, and of an interrupted question what it has told so far. `tools` has
what a GPU machine without a network needs. `make rehearse ARGS=quarter` asks all of it on the
simulated GPU, with `--small`: the tiny pair in place of large shapes.
"""
