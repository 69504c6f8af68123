# SPDX-License-Identifier: Apache-2.0
"""Word lists as plain text."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """The words of a text, in order."""
    return text.split()
