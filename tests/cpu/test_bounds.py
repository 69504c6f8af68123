# SPDX-License-Identifier: Apache-2.0
"""With NUMBA_BOUNDSCHECK=1 native twins raise where a row would reach into its neighbour.

The tests run with it, engines of the end-to-end tests too. Each case writes one entry beyond the
row of request slot 0, while the memory goes on with slot 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # vLLM's substitutes for pinned memory and events; they must come before its GPU modules.
    import vllm.v1.worker.cpu.shm  # noqa: F401

from tests.cpu.twin_cases import addresses
from tests.e2e.engines import ENVIRONMENT
from vllm_bastion.cpu.twins import TWINS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for CPU hosts only")

ROW = 8
_GPU = "vllm.v1.worker.gpu"


def ints(*values: int, dtype: Any = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def rows() -> torch.Tensor:
    return torch.zeros(2, ROW, dtype=torch.int32)


def staged_write(over: int) -> None:
    """A prompt is written, `over` tokens longer than the row."""
    count = ROW + over
    written = ints(0), ints(0), torch.arange(count, dtype=torch.int32), ints(count)
    TWINS[f"{_GPU}.buffer_utils:_apply_write_kernel"][(1,)](
        rows(), ROW, *written, None, BLOCK_SIZE=16, MULTI_GROUP=False
    )


def staged_blocks(over: int) -> None:
    """The same for block tables, which are given as addresses."""
    count, tables = ROW + over, [rows()]
    written = ints(0), ints(0), torch.arange(count, dtype=torch.int32), ints(count)
    TWINS[f"{_GPU}.buffer_utils:_apply_write_kernel"][(1,)](
        addresses(tables), ints(ROW, dtype=torch.int64), *written, ints(0), BLOCK_SIZE=16,
        MULTI_GROUP=True,
    )  # fmt: skip


@pytest.mark.parametrize("case", [staged_write, staged_blocks])
def test_a_row_does_not_reach_into_the_next(case: Any) -> None:
    case(0)
    with pytest.raises(IndexError):
        case(1)


def test_the_tests_check_bounds() -> None:
    """In this process and in the engines."""
    import numba

    assert numba.config.BOUNDSCHECK == 1
    assert ENVIRONMENT["NUMBA_BOUNDSCHECK"] == "1"
