# SPDX-License-Identifier: Apache-2.0
"""Measured latency profiles on disk, so that an engine is measured once.

One JSON file per `ProfileKey`, in `VLLM_BASTION_CACHE` or `$XDG_CACHE_HOME/vllm-bastion`. A cached
file is used only if its schema and its whole key match. Any other file (truncated, NaN, another
GPU's, an older schema, times that contradict each other) is measured again, with one warning. A
profile that was measured while other processes used the CPUs is kept for a day. Of two engines that
start together, the second one waits for the first one's measurement. If the folder cannot be
written, the engine still starts: it logs a warning and measures every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_bastion.envs import cache_dir
from vllm_bastion.logger import init_logger
from vllm_bastion.policy.cost.doubts import doubts
from vllm_bastion.policy.cost.paper import CalibratedRoofline, CalibrationReport
from vllm_bastion.policy.cost.table import StepCostTable

logger = init_logger(__name__)

SCHEMA = 2
WRITE = "write:"  # before the name of a file that is to be written
# Times are doubtful if other processes used this share of the CPUs; they are kept for this long.
LOADED, LOADED_S = 0.2, 24 * 3600.0
# Longer than any calibration; a process that has waited this long measures for itself.
_LOCK_TIMEOUT_S = 900.0


class ProfileError(ValueError):
    """A file that cannot be used as a profile; the message says why."""


@dataclass(frozen=True)
class ProfileKey:
    """Everything that a measured step time depends on."""

    device: str
    target_hash: str
    drafter_hash: str
    dtype: str
    attention_backend: str
    tp_size: int
    vllm_version: str
    graph_sizes: tuple[int, ...] = ()
    # data-parallel ranks that step together, and whether the experts are split among them
    dp_size: int = 1
    expert_parallel: bool = False
    # requests, rows and cached tokens of the largest steps that were timed; they are limited by the
    # engine's own settings, and an engine with higher limits would have to extrapolate
    largest: tuple[int, ...] = ()
    # Files of earlier versions lack these, so they match no engine.
    package_version: str = ""
    compile_mode: str = ""  # vLLM's compilation mode and CUDA graph mode
    target_quantization: str = ""  # of the checkpoint, or requested when it is loaded
    drafter_quantization: str = ""

    def file_name(self) -> str:
        """The device's name, readable, then a digest of the whole key."""
        text = json.dumps(asdict(self), sort_keys=True)
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:40]
        return f"{device}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def differences(self, other: ProfileKey) -> list[str]:
        """`name: value in other, not value in self` for each field in which `other` differs."""
        return [
            f"{f.name}: {getattr(other, f.name)!r}, not {getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True)
class Profile:
    """What calibration measured on one engine."""

    key: ProfileKey
    table: StepCostTable
    # None if the target is not a dense decoder: then there is no roofline, only the table
    calibrated: CalibratedRoofline | None = None
    # root mean square error on held-out points before and after calibration, ms
    rmse_before: float | None = None
    rmse_after: float | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    # names of target and drafter, for readers; the key has hashes of their configs
    names: tuple[str, str] = ("", "")
    # share of the CPUs that other processes used meanwhile
    load: float = 0.0

    @classmethod
    def from_measurement(
        cls,
        key: ProfileKey,
        table: StepCostTable,
        report: CalibrationReport | None,
        names: tuple[str, str] = ("", ""),
        load: float = 0.0,
    ) -> Profile:
        """Join a table and a calibration, which also extends the table to longer contexts."""
        if report is None:
            return cls(key, table, names=names, load=load)
        return cls(
            key,
            table.with_carrier(report.calibrated),
            report.calibrated,
            report.rmse_before,
            report.rmse_after,
            names=names,
            load=load,
        )

    def age_s(self) -> float:
        """Seconds since it was measured; infinite if that is unknown."""
        then = unix_time(self.created)
        return math.inf if then is None else datetime.now(UTC).timestamp() - then

    def doubts(self) -> list[str]:
        """Why its times may be wrong; empty for most."""
        found = [doubt.text() for doubt in doubts(self.table.samples)]
        if self.load >= LOADED:
            found.append(f"other processes used {100 * self.load:.0f}% of the CPUs meanwhile")
        return found

    def to_json(self) -> dict[str, Any]:
        """The file's content, which is also what rank 0 broadcasts to the other ranks."""
        return {
            "schema": SCHEMA,
            "created": self.created,
            "key": asdict(self.key),
            "table": self.table.to_json(),
            "calibrated": self.calibrated.to_json() if self.calibrated else None,
            "rmse_before": self.rmse_before,
            "rmse_after": self.rmse_after,
            "names": list(self.names),
            "load": self.load,
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Inverse of `to_json`.

        Raises:
            ProfileError: the schema is another one, or the content is not a profile.
        """
        if not isinstance(data, Mapping):
            raise ProfileError("the file is not a JSON object")
        if data.get("schema") != SCHEMA:
            raise ProfileError(f"schema {data.get('schema')!r}, this version reads {SCHEMA}")
        try:
            key_data = dict(data["key"])
            for name in ("graph_sizes", "largest"):
                key_data[name] = tuple(key_data.get(name, ()))
            calibrated = (
                CalibratedRoofline.from_json(data["calibrated"]) if data["calibrated"] else None
            )
            return cls(
                ProfileKey(**key_data),
                StepCostTable.from_json(data["table"], calibrated),
                calibrated,
                data["rmse_before"],
                data["rmse_after"],
                str(data["created"]),
                _two_names(data.get("names", ("", ""))),
                float(data.get("load", 0.0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"unreadable content: {error}") from error


def _two_names(names: Any) -> tuple[str, str]:
    target, drafter = names
    return str(target), str(drafter)


def unix_time(created: str) -> float | None:
    """`Profile.created` in seconds since the epoch; None if it is not in ISO format."""
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return None
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()


def config_hash(config: Mapping[str, Any]) -> str:
    """Digest of a model config (`PretrainedConfig.to_dict()`) without its location on disk."""
    volatile = ("_name_or_path", "transformers_version", "name_or_path")
    stable = {name: value for name, value in config.items() if name not in volatile}
    text = json.dumps(stable, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_profile(path: Path) -> Profile:
    """The profile in a file, whatever its key.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: the file is not a profile.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, parse_constant=_refuse_constant)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"no latency profile {path}") from error
    except (OSError, ValueError) as error:
        raise ProfileError(f"no readable JSON: {error}") from error
    return Profile.from_json(data)


def write_profile(profile: Profile, path: Path) -> None:
    """Write atomically: another process sees the old file or the new one, never part of one.

    Raises:
        OSError: the folder cannot be created or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(profile.to_json(), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files, but a cache may be shared and holds no secrets
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def profile_path(key: ProfileKey, directory: Path | None = None) -> Path:
    """The file that caches the profile of this key."""
    return (directory or cache_dir()) / key.file_name()


def load_or_measure(
    key: ProfileKey, measure: Callable[[], Profile], directory: Path | None = None
) -> Profile:
    """The cached profile of `key`; if there is none, `measure()`, which is then stored.

    Called on rank 0 only; the other ranks get its `Profile.to_json()`.
    """
    path, start = profile_path(key, directory), time.monotonic()
    profile, _ = _matching(path, key)
    if profile is not None:
        return profile
    with _lock(path) as locked:
        # Take what another engine measured meanwhile, doubtful or not: this one would do no better.
        profile, reason = _matching(path, key, time.monotonic() - start)
        if profile is not None:
            return profile
        if reason is not None:
            logger.warning("Latency profile %s is measured again: %s", path, reason)
        profile = measure()
        if locked:
            _store(profile, path)
        return profile


def open_profile(setting: str, key: ProfileKey, measure: Callable[[], Profile]) -> Profile | None:
    """The profile by the setting `bastion_calibration`.

    Args:
        setting: `auto` (the cached profile, else measured and stored), `off` (None), `write:` and a
            file to measure for and to write, or a file. A named file is used even if its key
            differs, with a warning.
        key: the key of this engine.
        measure: times this engine.

    Raises:
        ProfileError: see `check_setting`.
    """
    if setting == "off":
        return None
    if setting == "auto":
        return load_or_measure(key, measure)
    profile, path = check_setting(setting), _file_of(setting)
    if setting.startswith(WRITE):
        profile = measure()
        _store(profile, path)
        return profile
    assert profile is not None
    differences = key.differences(profile.key)
    if differences:
        logger.warning(
            "Latency profile %s was measured on another set-up: %s", path, "; ".join(differences)
        )
    return profile


def check_setting(setting: str) -> Profile | None:
    """Check `bastion_calibration` without measuring anything.

    Returns:
        The profile in the file that it names, if there is one.

    Raises:
        ProfileError: a named file is missing or not a profile, or the path to write to has no
            folder or is not a file.
    """
    if setting in ("auto", "off"):
        return None
    path = _file_of(setting)
    if setting.startswith(WRITE):
        if setting == WRITE or not path.parent.is_dir():
            raise ProfileError(
                f'"bastion_calibration": "{setting}" cannot be written: there is no folder '
                f"{path.parent}, make it first"
            )
        if not path.exists():
            return None
    try:
        return read_profile(path)
    except FileNotFoundError as error:
        raise ProfileError(
            f'"bastion_calibration": there is no file {path}: write one with "{WRITE}{path}" or '
            f"'vllm-bastion calibrate TARGET DRAFTER --out {path}', or give \"auto\""
        ) from error
    except ProfileError as error:
        raise ProfileError(
            f'"bastion_calibration": {path} is not a latency profile ({error}): delete it or give '
            '"auto"'
        ) from error


def _file_of(setting: str) -> Path:
    return Path(setting.removeprefix(WRITE)).expanduser()


def _matching(
    path: Path, key: ProfileKey, waited_s: float = 0.0
) -> tuple[Profile | None, str | None]:
    """The profile in `path` if its key matches and its times are not doubtful.

    Else None and the reason (None: no file). A profile that was measured within the last `waited_s`
    seconds is taken even if it is doubtful.
    """
    try:
        profile = read_profile(path)
    except FileNotFoundError:
        return None, None
    except ProfileError as error:
        return None, str(error)
    differences = key.differences(profile.key)
    if differences:
        return None, "; ".join(differences)
    contradictory, doubtful = doubts(profile.table.samples), profile.doubts()
    age_s = profile.age_s()
    if doubtful and (contradictory or age_s > LOADED_S) and age_s > waited_s + 1.0:
        return None, doubtful[0]
    return profile, None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock of `path`. Yields whether it is held: false if the folder cannot be written."""
    from filelock import FileLock, Timeout

    lock = FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        logger.warning("Latency profile %s is locked by another process", path)
        yield False
        return
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        _warn_unwritable(path, error)
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _store(profile: Profile, path: Path) -> None:
    """Write, or warn that the folder cannot be written."""
    try:
        write_profile(profile, path)
    except OSError as error:
        _warn_unwritable(path, error)


def _warn_unwritable(path: Path, error: Exception) -> None:
    logger.warning(
        "Latency profile %s cannot be stored (%s): it will be measured at every start. Set "
        "VLLM_BASTION_CACHE, or bastion_calibration, to a place that can be written.",
        path,
        error,
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a measurement")
