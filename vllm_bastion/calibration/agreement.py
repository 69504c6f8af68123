# SPDX-License-Identifier: Apache-2.0
"""Ranks whose steps are collective measure together, and decide from the same numbers.

`group` is vLLM's ``GroupCoordinator`` of them. Rank 0 alone looks at files and at their lock: a
rank that waited for the lock would be missing from the measurement that its holder is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm_bastion.policy.cost.store import Profile, ProfileError, ProfileKey, open_profile

T = TypeVar("T")

# Rank 0's word to the others that there is no profile to read.
_MEASURE = "measure"


def of_rank_0(group: Any, value: Callable[[], T]) -> T:
    """Rank 0's `value()` on every rank; the others' is not asked for."""
    own = value() if group.rank_in_group == 0 else None
    answer: T = group.broadcast_object(own, src=0)
    return answer


def shared_profile(
    setting: str, key: ProfileKey, measure: Callable[[], Profile], group: Any
) -> Profile | None:
    """What `open_profile` gives on rank 0, on every rank. All of them measure, or none does.

    Raises:
        ProfileError: the named file exists and is no profile.
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
