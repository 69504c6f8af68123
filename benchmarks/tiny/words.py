# SPDX-License-Identifier: Apache-2.0
"""Word lists as plain text."""

from __future__ import annotations


def words(text: str) -> list[str]:
    return text.split()
