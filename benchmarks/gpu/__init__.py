# SPDX-License-Identifier: Apache-2.0
"""Questions for a quarter of an hour of GPU, each with a limit of time, and one page.

    python -m benchmarks.gpu --seconds 430        # asks until then
    python -m benchmarks.gpu --seconds 330        # goes on with what is missing
    python -m benchmarks.gpu --list               # the questions, without a GPU
    python -m benchmarks.gpu --page               # writes the page anew, without a GPU
    python -m benchmarks.gpu --only trace ops     # these alone

Each question runs in a process of its own, and nothing beside it. A process that reaches its limit
is interrupted and leaves a trace. The next call skips what has been answered; `trace` and `real`
also keep what an interrupted call has measured. `kit.sh` has what a machine without a network
needs. `make rehearse ARGS=quarter` asks all of it on the simulated GPU, with `--small`: the tiny
pair in place of large shapes.
"""
