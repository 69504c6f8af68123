# SPDX-License-Identifier: Apache-2.0
"""The results file of `benchmarks.paper`: what is in it survives a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.store import Key, Store, StoreError, read_rows

SETTINGS = {"target": "t", "tokens": 8, "seed": 0}


def response(number: int, **fields: Any) -> dict[str, Any]:
    key = {"method": "plain", "temperature": 0.0, "concurrency": 1, "set": "a", "turn": 0}
    return {"kind": "response", **key, "id": str(number), **fields}


def opened(path: Path, **changes: Any) -> Store:
    return Store(path, SETTINGS | changes, {"name": "x"})


def test_rows_are_in_the_file_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.jsonl"
    with opened(path) as store:
        store.append(response(0))
        assert [row["kind"] for row in read_rows(path)] == ["run", "response"]
    with opened(path) as store:
        assert list(store.responses()) == [Key("plain", 0.0, 1, "a", "0", 0)]
        store.append(response(1))
    assert [row["kind"] for row in read_rows(path)] == ["run", "response", "run", "response"]


def test_a_torn_last_line_is_dropped_and_the_next_row_starts_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with opened(path) as store:
        store.append(response(0))
    with path.open("ab") as file:
        file.write(b'{"kind": "response", "method": "pl')
    assert len(list(read_rows(path))) == 2
    with opened(path) as store:
        store.append(response(1))
        assert {key.id for key in store.responses()} == {"0", "1"}
    assert len(path.read_text().splitlines()) == 4


def test_a_file_of_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    opened(path).__exit__()
    with pytest.raises(StoreError, match=r"made with tokens=8, not 9: choose another --out"):
        opened(path, tokens=9)
    opened(path, samples=3).__exit__()  # more prompts may be added later
