# SPDX-License-Identifier: Apache-2.0
"""Measured latency profiles on disk, so that an engine measures itself once.

One JSON file per `ProfileKey`, in `VLLM_BASTION_CACHE` or `$XDG_CACHE_HOME/vllm-bastion`. A file is
believed only if its schema and its whole key match; anything else (truncated, NaN, another GPU's,
an older schema) is measured again with one warning. Writing is atomic, and a lock file makes the
second of two engines that start together wait for the first one's measurement. A folder that cannot
be written costs a warning and a new measurement at every start, never the start itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_bastion.envs import cache_dir
from vllm_bastion.logger import init_logger
from vllm_bastion.policy.cost.fit import CalibratedRoofline, CalibrationReport
from vllm_bastion.policy.cost.table import StepCostTable

SCHEMA = 2
# Longer than any calibration; a process that waited this long measures for itself.
_LOCK_TIMEOUT_S = 900.0


class ProfileError(ValueError):
    """A profile file that must not be used; the text says why."""


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
    # data-parallel ranks that step together, and whether they share out the experts
    dp_size: int = 1
    expert_parallel: bool = False
    # requests, rows and cached tokens of the largest steps that were timed; the engine's own limits
    # end them, and one with wider limits would go by guesses
    largest: tuple[int, ...] = ()

    def file_name(self) -> str:
        """Readable device, then a digest of the whole key."""
        text = json.dumps(asdict(self), sort_keys=True)
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:40]
        return f"{device}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def differences(self, other: ProfileKey) -> list[str]:
        """One `name: theirs, not ours` per field in which `other` differs."""
        return [
            f"{f.name}: {getattr(other, f.name)!r}, not {getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True)
class Profile:
    """What calibration found out about one engine."""

    key: ProfileKey
    table: StepCostTable
    # None where the target's config is no dense decoder; then only the measured table is there
    calibrated: CalibratedRoofline | None = None
    # RMSE on held-out points before and after calibration, ms
    rmse_before: float | None = None
    rmse_after: float | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @classmethod
    def from_measurement(
        cls, key: ProfileKey, table: StepCostTable, report: CalibrationReport | None
    ) -> Profile:
        """Join a table and a calibration; the calibration also carries the table's contexts."""
        if report is None:
            return cls(key, table)
        table = table.with_carrier(report.calibrated)
        return cls(key, table, report.calibrated, report.rmse_before, report.rmse_after)

    def to_json(self) -> dict[str, Any]:
        """The file's content; also what rank 0 broadcasts to the other ranks."""
        return {
            "schema": SCHEMA,
            "created": self.created,
            "key": asdict(self.key),
            "table": self.table.to_json(),
            "calibrated": self.calibrated.to_json() if self.calibrated else None,
            "rmse_before": self.rmse_before,
            "rmse_after": self.rmse_after,
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Inverse of `to_json`.

        Raises:
            ProfileError: another schema, or content that is no profile.
        """
        if not isinstance(data, Mapping):
            raise ProfileError("the file holds no JSON object")
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
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"unreadable content: {error}") from error


def config_hash(config: Mapping[str, Any]) -> str:
    """Digest of a model config (`PretrainedConfig.to_dict()`), its place on disk left out."""
    volatile = ("_name_or_path", "transformers_version", "name_or_path")
    kept = {name: value for name, value in config.items() if name not in volatile}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_profile(path: Path) -> Profile:
    """The profile in a file, whatever its key.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: the file cannot be read as a profile.
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
    """Write atomically: another process sees the old file or the new one, never a part.

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
        # mkstemp makes private files; a cache may be shared, and there is no secret in it
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def profile_path(key: ProfileKey, directory: Path | None = None) -> Path:
    """Where the profile of this key lives."""
    return (directory or cache_dir()) / key.file_name()


def load_or_measure(
    key: ProfileKey, measure: Callable[[], Profile], directory: Path | None = None
) -> Profile:
    """The cached profile of `key`, or the one that `measure` returns, which is then stored.

    Called on rank 0 only; the others get `Profile.to_json()` from it.
    """
    path = profile_path(key, directory)
    profile, reason = _matching(path, key)
    if profile is not None:
        return profile
    with _lock(path) as locked:
        if locked:
            # Another engine may have measured while we waited.
            profile, reason = _matching(path, key)
            if profile is not None:
                return profile
        if reason is not None:
            warn("Latency profile %s is measured again: %s", path, reason)
        profile = measure()
        if locked:
            try:
                write_profile(profile, path)
            except OSError as error:
                _warn_unwritable(path, error)
    return profile


def open_profile(setting: str, key: ProfileKey, measure: Callable[[], Profile]) -> Profile | None:
    """What `bastion_calibration` asks for.

    Args:
        setting: `auto` (cached, else measured and stored), `off` (None), or a file. A named file is
            used whatever it was measured on, with a warning where its key differs; one that does
            not exist is measured and written.

    Raises:
        ProfileError: the named file exists and is no profile.
    """
    if setting == "off":
        return None
    if setting == "auto":
        return load_or_measure(key, measure)
    path = Path(setting).expanduser()
    try:
        profile = read_profile(path)
    except FileNotFoundError:
        profile = measure()
        try:
            write_profile(profile, path)
        except OSError as error:
            _warn_unwritable(path, error)
        return profile
    except ProfileError as error:
        raise ProfileError(
            f"bastion_calibration: {path} is no latency profile ({error}); delete it or give 'auto'"
        ) from error
    differences = key.differences(profile.key)
    if differences:
        warn("Latency profile %s was measured on another set-up: %s", path, "; ".join(differences))
    return profile


def _matching(path: Path, key: ProfileKey) -> tuple[Profile | None, str | None]:
    """The profile in `path` if it is this key's; else None and why (None: no file)."""
    try:
        profile = read_profile(path)
    except FileNotFoundError:
        return None, None
    except ProfileError as error:
        return None, str(error)
    differences = key.differences(profile.key)
    return (None, "; ".join(differences)) if differences else (profile, None)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock of `path`; yields whether it is held, i.e. whether the folder is writable."""
    from filelock import FileLock, Timeout

    lock = FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        # Timeout is an OSError; NotImplementedError: a file system without locks
        if isinstance(error, Timeout):
            warn("Latency profile %s is locked by another process", path)
        else:
            _warn_unwritable(path, error)
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _warn_unwritable(path: Path, error: Exception) -> None:
    warn(
        "Latency profile %s cannot be stored (%s): it will be measured at every start. Set "
        "VLLM_BASTION_CACHE to a folder that can be written.",
        path,
        error,
    )


def warn(text: str, *args: object) -> None:
    """Log a warning; the logger is made late, as it imports vLLM, which `show` does not need."""
    init_logger(__name__).warning(text, *args)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no measurement")
