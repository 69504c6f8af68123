# SPDX-License-Identifier: Apache-2.0
"""The recording's file: round trip, size and refusals."""

import numpy as np
from synthetic_recording import synthetic_recording

from benchmarks.replay.recording import (
    Drafted,
    Emitted,
    Recording,
    load_recording,
    recording_of,
    save_recording,
)


def test_round_trip(tmp_path):
    recording = synthetic_recording(prompts=2, length=20)
    save_recording(recording, tmp_path / "r.npz")
    loaded = load_recording(tmp_path / "r.npz")
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.npz"]
    for name in Recording.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(recording, name), name)


def test_large_vocabularies_keep_their_tokens(tmp_path):
    request = Emitted("a", "code", 0.5, [7, 8, 9], [1, 151935, 4])
    draft = Drafted("a", 1, [[151935, 7]], [[-0.5, -1.0]])
    save_recording(recording_of({}, [request], [draft]), tmp_path / "r.npz")
    loaded = load_recording(tmp_path / "r.npz")
    assert loaded.topk_tokens.tolist() == [[[151935, 7]]]
    assert loaded.continuation(0).tolist() == [151935, 4]
    assert loaded.context_lens.tolist() == [3]


def test_drafts_come_in_any_order_and_those_that_cannot_be_replayed_are_dropped():
    requests = [
        Emitted("a", "d", 0, range(10), [9, 8, 7, 6, 5, 4]),
        Emitted("b", "d", 0, range(10, 20), [0, 1, 2, 3, 4]),
    ]
    drafts = [
        Drafted(name, position, [[5], [6]], [[-0.1], [-0.2]])
        for name, position in (("b", 2), ("a", 3), ("unfinished", 1), ("a", 1), ("a", 4))
    ]
    recording = recording_of({}, requests, drafts)
    recording.check()
    assert recording.request_ids == ["a", "b"]
    # position 4 of "a" has two tokens left, two depths and the bonus need three
    assert list(zip(recording.step_requests, recording.step_positions, strict=True)) == [
        (0, 1),
        (0, 3),
        (1, 2),
    ]
    assert recording.continuation(1).tolist() == [6, 5, 4]
    assert recording.context_lens.tolist() == [10, 12, 11]
    assert recording.text(1).tolist() == [*range(10, 20), 0, 1, 2, 3, 4]
