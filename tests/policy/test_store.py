# SPDX-License-Identifier: Apache-2.0
"""Bad profiles never stop an engine and are never used."""

import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from vllm_bastion.policy.cost import store as profile_store
from vllm_bastion.policy.cost.devices import DeviceSpec
from vllm_bastion.policy.cost.paper import (
    CalibratedRoofline,
    CalibrationReport,
    ModelShape,
    Roofline,
)
from vllm_bastion.policy.cost.store import (
    Profile,
    ProfileError,
    ProfileKey,
    config_hash,
    load_or_measure,
    open_profile,
    profile_path,
    read_profile,
    write_profile,
)
from vllm_bastion.policy.cost.table import StepCostTable

KEY = ProfileKey("NVIDIA H200", "t" * 16, "d" * 16, "bfloat16", "BASTION", 1, "0.32.0", (1, 8, 16))


def _profile(ms=5.0, key=KEY):
    shape = ModelShape(36, 4096, 32, 8, 128, 12288, 151936)
    calibrated = CalibratedRoofline(
        Roofline(shape, DeviceSpec("H200", 989.5e12, 4800e9, "test")), 1.2, 0.5, 1.5, 1.0
    )
    table = StepCostTable(
        [(1, 64, ms), (8, 64, ms + 1), (16, 64, ms + 2)], [(1, 1.0)], 0.3, max_rows=16,
        captured_sizes=(1, 8, 16),
    )  # fmt: skip
    report = CalibrationReport(calibrated, 4.0, 0.4, 12, 4)
    return Profile.from_measurement(key, table, report)


class _Measure:
    def __init__(self, ms=5.0):
        self.calls, self.ms = 0, ms

    def __call__(self):
        self.calls += 1
        return _profile(self.ms)


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(
        profile_store.logger, "warning", lambda text, *args: messages.append(text % args)
    )
    return messages


def test_measured_once_then_loaded(tmp_path, warnings):
    measure = _Measure()
    first = load_or_measure(KEY, measure, tmp_path)
    second = load_or_measure(KEY, measure, tmp_path)
    assert measure.calls == 1 and not warnings
    for context in (0, 64, 10_000):
        np.testing.assert_array_equal(
            first.table.cost_ms(2, context), second.table.cost_ms(2, context)
        )
    assert second.calibrated == first.calibrated and second.rmse_after == 0.4
    assert second.table.carrier == second.calibrated
    assert second.created == first.created


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA L40S"}, {"target_hash": "x"}, {"drafter_hash": "x"},
        {"dtype": "float16"}, {"attention_backend": "FLASH_ATTN"}, {"tp_size": 2},
        {"vllm_version": "0.33.0"}, {"graph_sizes": (1, 8)}, {"largest": (16, 1024, 2048)},
        {"package_version": "0.2.0"}, {"compile_mode": "VLLM_COMPILE, CUDA graphs FULL"},
        {"target_quantization": "fp8"}, {"drafter_quantization": "fp8"},
    ],
)  # fmt: skip
def test_every_part_of_the_key_has_its_own_file(tmp_path, change):
    measure = _Measure()
    load_or_measure(KEY, measure, tmp_path)
    load_or_measure(replace(KEY, **change), measure, tmp_path)
    assert measure.calls == 2
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_file_without_the_newer_key_fields_is_measured_again(tmp_path, warnings):
    key = replace(KEY, package_version="0.2.0", compile_mode="NONE")
    path = profile_path(key, tmp_path)
    write_profile(_profile(ms=99.0, key=key), path)
    data = json.loads(path.read_text())
    del data["key"]["package_version"], data["key"]["compile_mode"]
    path.write_text(json.dumps(data))
    measure = _Measure(ms=5.0)
    assert load_or_measure(key, measure, tmp_path).table.samples[0][2] == 5.0
    assert measure.calls == 1 and len(warnings) == 1 and "package_version" in warnings[0]


def _without(name):
    return lambda data: json.dumps({k: v for k, v in data.items() if k != name})


def _with(value, *place):
    """The profile with another value at a place."""

    def changed(data):
        at = data
        for name in place[:-1]:
            at = at[name]
        at[place[-1]] = value
        return json.dumps(data)

    return changed


# Kind of damage -> the file's text, from the profile that it had.
DAMAGES = {
    "truncated": lambda data: json.dumps(data)[:200], "empty": lambda data: "",
    "binary": lambda data: bytes(range(256)), "no object": lambda data: "[1, 2]",
    "old schema": _with(0, "schema"), "no schema": _without("schema"),
    "missing table": _without("table"), "NaN": _with(float("nan"), "table", "samples", 1, 2),
    "negative time": _with(-2.0, "table", "samples", 1, 2),
    "NaN coefficient": _with(float("nan"), "calibrated", "memory_slope"),
    "negative coefficient": _with(-1.0, "calibrated", "compute_offset_ms"),
    "no coefficient": _with(None, "calibrated", "memory_offset_ms"),
    "no shape": _with({}, "calibrated", "roofline", "shape"),
    "NaN error": _with(float("nan"), "rmse_after"),
    "another GPU": _with("NVIDIA L40S", "key", "device"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_bad_files_are_measured_again_with_one_warning(tmp_path, warnings, how):
    path = profile_path(KEY, tmp_path)
    write_profile(_profile(ms=99.0), path)
    text = DAMAGES[how](json.loads(path.read_text()))
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    measure = _Measure(ms=5.0)
    profile = load_or_measure(KEY, measure, tmp_path)
    assert measure.calls == 1 and profile.table.samples[0][2] == 5.0
    assert len(warnings) == 1 and "measured again" in warnings[0]
    if how == "another GPU":
        assert "NVIDIA L40S" in warnings[0] and "NVIDIA H200" in warnings[0]
    # the file was replaced: the next start neither warns nor measures
    load_or_measure(KEY, measure, tmp_path)
    assert measure.calls == 1 and len(warnings) == 1


def test_a_folder_in_the_files_place_does_not_stop_the_start(tmp_path, warnings):
    profile_path(KEY, tmp_path).mkdir(parents=True)
    measure = _Measure()
    load_or_measure(KEY, measure, tmp_path)
    assert measure.calls == 1 and any("cannot be stored" in text for text in warnings)


def test_folder_that_cannot_exist_works_without_storing(tmp_path, warnings):
    blocked = tmp_path / "file"
    blocked.write_text("")
    measure = _Measure()
    for calls in (1, 2):
        assert load_or_measure(KEY, measure, blocked / "cache").table.samples[0][2] == 5.0
        assert measure.calls == calls
    assert len(warnings) == 2 and all("VLLM_BASTION_CACHE" in text for text in warnings)


def _in_read_only_folder(folder, results):
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write anywhere: become nobody
    messages = []
    profile_store.logger.warning = lambda text, *args: messages.append(text % args)
    measure = _Measure()
    loaded = load_or_measure(KEY, measure, Path(folder))
    results.put((measure.calls, loaded.table.samples[0][2], messages))


@pytest.fixture
def public_folder():
    # pytest's own temporary folders are closed to other users, and the child becomes one
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        os.chmod(name, 0o755)


@pytest.mark.parametrize("filled", [False, True])
def test_read_only_folder(public_folder, filled):
    import filelock  # noqa: F401  # the child cannot read every folder it might import from
    import scipy.optimize  # noqa: F401

    folder = public_folder
    if filled:
        write_profile(_profile(ms=7.0), profile_path(KEY, folder))
        profile_path(KEY, folder).chmod(0o444)
    folder.chmod(0o555)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_read_only_folder, args=(str(folder), results))
    child.start()
    calls, ms, messages = results.get(timeout=60)
    child.join()
    if filled:
        assert (calls, ms, messages) == (0, 7.0, [])
    else:
        assert (calls, ms) == (1, 5.0)
        assert len(messages) == 1 and "cannot be stored" in messages[0]
        assert list(folder.iterdir()) == []


def _start_engine(folder, barrier, results):
    def measure():
        time.sleep(0.5)
        results.put(("measured", os.getpid()))
        return _profile(ms=float(os.getpid()))

    os.environ["VLLM_BASTION_CACHE"] = folder
    barrier.wait(timeout=60)
    profile = open_profile("auto", KEY, measure)
    results.put(("got", profile.table.samples[0][2]))


def test_two_processes_at_once_measure_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    children = [
        context.Process(target=_start_engine, args=(str(tmp_path), barrier, results))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    events = [results.get(timeout=60) for _ in range(3)]
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    measured = [value for kind, value in events if kind == "measured"]
    got = [value for kind, value in events if kind == "got"]
    assert len(measured) == 1 and got == [float(measured[0])] * 2


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = profile_path(KEY, tmp_path)
    write_profile(_profile(ms=5.0), path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_profile(_profile(ms=6.0), path)
    assert read_profile(path).table.samples[0][2] == 5.0
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_failed_measurement_stores_nothing_and_frees_the_lock(tmp_path):
    def fail():
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        load_or_measure(KEY, fail, tmp_path)
    measure = _Measure()
    load_or_measure(KEY, measure, tmp_path)
    assert measure.calls == 1


def test_cache_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path / "own"))
    load_or_measure(KEY, _Measure())
    assert profile_path(KEY).parent == tmp_path / "own" and profile_path(KEY).exists()
    monkeypatch.delenv("VLLM_BASTION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert profile_path(KEY).parent == tmp_path / "xdg" / "vllm-bastion"


def test_setting_off_auto_and_file(tmp_path, monkeypatch, warnings):
    monkeypatch.setenv("VLLM_BASTION_CACHE", str(tmp_path / "cache"))
    measure = _Measure()
    assert open_profile("off", KEY, measure) is None and measure.calls == 0
    open_profile("auto", KEY, measure)
    open_profile("auto", KEY, measure)
    assert measure.calls == 1
    named = tmp_path / "mine.json"
    with pytest.raises(ProfileError, match=r'there is no file .*mine.json: write one with "write:'):
        open_profile(str(named), KEY, measure)
    assert measure.calls == 1 and list(tmp_path.iterdir()) == [tmp_path / "cache"]
    with pytest.raises(ProfileError, match="there is no folder"):
        open_profile(f"write:{tmp_path}/no/mine.json", KEY, measure)
    for calls in (2, 3):  # measured at each start
        open_profile(f"write:{named}", KEY, measure)
        assert measure.calls == calls and named.exists() and not warnings
    open_profile(str(named), KEY, measure)
    # a named file is used even if another machine wrote it, with a warning
    other = replace(KEY, device="NVIDIA L40S")
    assert open_profile(str(named), other, measure).key == KEY
    assert measure.calls == 3 and len(warnings) == 1 and "NVIDIA L40S" in warnings[0]
    # and never overwritten if it is not a profile
    named.write_text("notes")
    with pytest.raises(ProfileError, match='delete it or give "auto"'):
        open_profile(str(named), KEY, measure)
    with pytest.raises(ProfileError, match="is not a latency profile"):
        open_profile(f"write:{named}", KEY, measure)
    assert named.read_text() == "notes"


def _contradictory(ago_s=0.0, load=0.0, ms=299.0):
    samples = [(1, 64, 5.0), (8, 64, ms), (16, 64, 7.0)]
    created = (datetime.now(UTC) - timedelta(seconds=ago_s)).isoformat(timespec="seconds")
    return replace(Profile(KEY, StepCostTable(samples, max_rows=16)), created=created, load=load)


def test_times_that_contradict_each_other_are_measured_at_the_next_start(tmp_path, warnings):
    write_profile(_contradictory(ago_s=60), profile_path(KEY, tmp_path))
    measure = _Measure()
    assert load_or_measure(KEY, measure, tmp_path).table.samples[0][2] == 5.0
    assert (
        measure.calls == 1
        and "8 rows (1 request, 64 cached tokens each) took 299 ms" in warnings[0]
    )
    assert "measured again" in warnings[0]
    load_or_measure(KEY, measure, tmp_path)
    assert measure.calls == 1


@pytest.mark.parametrize(("hours", "calls"), [(1, 0), (25, 1)])
def test_a_profile_from_a_busy_machine_is_kept_for_a_day(tmp_path, warnings, hours, calls):
    busy = _contradictory(ago_s=3600 * hours, load=0.6, ms=6.0)
    write_profile(busy, profile_path(KEY, tmp_path))
    measure = _Measure()
    load_or_measure(KEY, measure, tmp_path)
    assert measure.calls == calls and len(warnings) == calls


def test_config_hash_ignores_where_the_model_lies():
    config = {"hidden_size": 4, "dtype": "bfloat16", "_name_or_path": "/a"}
    assert config_hash(config) == config_hash(config | {"_name_or_path": "/b"})
    assert config_hash(config) != config_hash(config | {"hidden_size": 8})
