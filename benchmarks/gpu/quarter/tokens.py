# SPDX-License-Identifier: Apache-2.0
"""Question `tokens`: end-to-end tests of tokens against plain decoding. Nothing is timed."""

from __future__ import annotations

import pytest

from benchmarks.gpu.quarter.job import Job

_TESTS = (
    "tests/e2e/test_lossless.py",
    "tests/e2e/test_capture.py::test_full_graphs_capture_the_mask",
)
_SMALL = (
    "tests/e2e/test_capture.py::test_full_graphs_capture_the_mask",
    "tests/e2e/test_capture.py::test_no_request_waits_for_the_drafters_input_kernel",
)


class _Outcomes:
    """Tells what becomes of each test."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            lines = report.longreprtext.splitlines() if report.failed else []
            text = "\n".join(line[2:] for line in lines if line.startswith("E "))[-2000:]
            self._job.note(
                report.nodeid, outcome=report.outcome, seconds=report.duration, text=text
            )


def ask(job: Job) -> None:
    """Run those that no earlier call ran.

    Raises:
        RuntimeError: no test could be run.
    """
    skip = [f"--deselect={name}" for name in job.known]
    tests = _SMALL if job.small else _TESTS
    status = pytest.main(
        ["-m", "not slow", "-k", "not sync or async or capture", "-v", *skip, *tests],
        plugins=[_Outcomes(job)],
    )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}")
