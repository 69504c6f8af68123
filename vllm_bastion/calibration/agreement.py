# SPDX-License-Identifier: Apache-2.0
"""Ranks that step together also measure together, and decide from the same numbers.

`group` is their ``GroupCoordinator`` of vLLM. Only rank 0 reads files and takes their lock: another
rank that waited for the lock would be missing from the collective steps that rank 0 measures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm_bastion.policy.cost.store import Profile, ProfileError, ProfileKey, open_profile

T = TypeVar("T")

# Rank 0 broadcasts this if there is no profile to load.
_MEASURE = "measure"


def from_rank_0(group: Any, value: Callable[[], T]) -> T:
    """Rank 0's `value()`, on every rank; the other ranks do not call it."""
    own = value() if group.rank_in_group == 0 else None
    answer: T = group.broadcast_object(own, src=0)
    return answer


def shared_profile(
    setting: str, key: ProfileKey, measure: Callable[[], Profile], group: Any
) -> Profile | None:
    """Rank 0's `open_profile`, on every rank. Either all ranks measure or none does.

    Raises:
        ProfileError: the named file exists and is not a profile.
    """
    if setting == "off":
        return None
    if group.rank_in_group != 0:
        answer = group.broadcast_object(src=0)
        if answer == _MEASURE:
            measure()
            answer = group.broadcast_object(src=0)
    else:

        def measure_with_all() -> Profile:
            group.broadcast_object(_MEASURE, src=0)
            return measure()

        try:
            profile = open_profile(setting, key, measure_with_all)
            assert profile is not None
            answer = profile.to_json()
        except ProfileError as error:
            answer = error
        group.broadcast_object(answer, src=0)
    if isinstance(answer, ProfileError):
        raise answer
    return Profile.from_json(answer)
