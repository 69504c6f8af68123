# SPDX-License-Identifier: Apache-2.0
"""The page as HTML, and what it shows of a worker's snapshot."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

_DATA = '<script type="application/json" id="data">null</script>'
# A snapshot of a worker; see `telemetry.recorder.Recorder.snapshot`.
Snapshot = dict[str, Any]


@cache
def html() -> str:
    """The page of a server, which polls for its data."""
    return files("vllm_bastion.page").joinpath("page.html").read_text(encoding="utf-8")


@cache
def docs() -> dict[str, str]:
    """The Markdown pages of `docs/`, which the package has as well, by file name."""
    found = files("vllm_bastion").joinpath("docs").iterdir()
    pages = sorted((page for page in found if page.name.endswith(".md")), key=lambda one: one.name)
    return {page.name: page.read_text(encoding="utf-8") for page in pages}


def with_data(snapshots: Sequence[Snapshot]) -> str:
    """The page with data in it, which polls for nothing.

    Args:
        snapshots: of one run, oldest first, as `decoded` returns them.
    """
    text = json.dumps(list(snapshots), ensure_ascii=True, allow_nan=False)
    # "<" could end the script element. HTML has no escapes there, but JSON has.
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    page = html()
    assert page.count(_DATA) == 1
    return page.replace(_DATA, _DATA.replace("null", text))


def content_security_policy() -> str:
    """Allows the page its own script and style, and requests to its own server; nothing else."""
    (script,) = re.findall(r"<script>(.*?)</script>", html(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def decoded(snapshot: Snapshot, seconds: float, text: Callable[[int], str]) -> Snapshot:
    """A snapshot with a time and with the texts of its trees' tokens.

    Args:
        snapshot: of a worker, with the page's details.
        seconds: when it was taken, on any clock.
        text: of a token id.
    """
    page = dict(snapshot["page"])
    page["trees"] = [
        {
            **tree,
            "root": text(tree["root"]),
            "tokens": [text(token) for token in tree["tokens"]],
            "emitted": [text(token) for token in tree["emitted"]],
        }
        for tree in page["trees"]
    ]
    return {**snapshot, "page": page, "seconds": seconds}
