# SPDX-License-Identifier: Apache-2.0
"""Marks of the end-to-end tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.engines import ON_GPU


def on_cpu(reason: str, *more: pytest.MarkDecorator) -> list[pytest.MarkDecorator]:
    """The marks of a file whose engines run on a CPU only."""
    return [pytest.mark.e2e, pytest.mark.skipif(ON_GPU, reason=reason), *more]


def slow(*values: Any) -> Any:
    """These values of a parameter, in the slow lane."""
    return pytest.param(*values, marks=pytest.mark.slow)
