# SPDX-License-Identifier: Apache-2.0
"""With NUMBA_BOUNDSCHECK=1 native twins raise where a row would reach into its neighbour.

The tests run with it, engines of the end-to-end tests too. Each case writes or reads one entry
beyond the row of request slot 0, while the memory goes on with slot 1.
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
    """A tensor of these numbers."""
    return torch.tensor(values, dtype=dtype)


def rows() -> torch.Tensor:
    """Two rows."""
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


def prompt_rows(over: int) -> None:
    """A step takes a prompt's last tokens."""
    TWINS[f"{_GPU}.input_batch:_prepare_prefill_inputs_kernel"][(1,)](
        torch.zeros(ROW, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32), 2, 1, ints(0),
        ints(0, 2 + over), rows(), ROW, ints(2 * ROW), ints(ROW - 2), BLOCK_SIZE=16,
        LOOKAHEAD_BLOCK=0,
    )  # fmt: skip


def emitted(over: int) -> None:
    """Tokens of an accepted path are appended to a request's."""
    count, twin = 2 + over, TWINS[f"{_GPU}.input_batch:_post_update_kernel"]
    newer = {"draft_tokens_ptr": None, "draft_tokens_out_ptr": None, "num_draft_tokens": 0}
    twin[(1,)](
        ints(0), ints(ROW), torch.zeros(2, 1, dtype=torch.int64), None, 0,
        torch.zeros(1, 4, dtype=torch.int64), 4, ints(count), ints(0), ints(0, count), rows(), ROW,
        ints(ROW - 2), **{name: value for name, value in newer.items() if name in twin.names},
    )  # fmt: skip


def slots(over: int) -> None:
    """The cache slots of positions, in blocks of four."""
    tables, block = [rows()], 4
    TWINS[f"{_GPU}.block_table:_compute_slot_mappings_kernel"][(1, 2)](
        4, ints(0), ints(0, 1), ints(ROW * block - 1 + over, dtype=torch.int64), addresses(tables),
        ints(ROW, dtype=torch.int64), ints(block), torch.ones(1, dtype=torch.bool),
        torch.zeros(1, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.int64), 4, 0, CP_SIZE=1,
        CP_INTERLEAVE=1, PAD_ID=-1, TRITON_BLOCK_SIZE=16,
    )  # fmt: skip


@pytest.mark.parametrize("case", [staged_write, staged_blocks, prompt_rows, emitted, slots])
def test_a_row_does_not_reach_into_the_next(case: Any) -> None:
    case(0)
    with pytest.raises(IndexError):
        case(1)


def test_the_tests_check_bounds() -> None:
    """In this process and in the engines."""
    import numba

    assert numba.config.BOUNDSCHECK == 1
    assert ENVIRONMENT["NUMBA_BOUNDSCHECK"] == "1"
