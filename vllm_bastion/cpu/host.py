# SPDX-License-Identifier: Apache-2.0
"""The CPU's side of the platform interface; the docstrings are in `vllm_bastion.host`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_bastion.host import Draw, Host

if TYPE_CHECKING:
    from bastion_kernels.bound import BoundOp


class CpuHost(Host):
    """An engine on a CPU."""

    runs_ahead = False
    default_nodes = 63  # every extra token costs time
    serves_float8_products = False

    # ---- what the host can serve --------------------------------------------------------

    def serves_gated_delta(self) -> bool:
        return True

    def tree_backend(self, backend: type[Any]) -> type[Any]:
        if backend.get_name() != "CPU_ATTN":
            return super().tree_backend(backend)
        from vllm_bastion.cpu.attention import TreeCPUAttentionBackend

        return TreeCPUAttentionBackend

    def default_attention_backend(self) -> Any | None:
        return None

    # ---- the worker's start -------------------------------------------------------------

    def needs_replacements(self) -> bool:
        from vllm.triton_utils import HAS_TRITON

        return not HAS_TRITON

    def compile_factors(self, drafter_weights: str) -> tuple[str, ...]:
        from bastion_kernels.cpu.cache import host_cpu
        from vllm_bastion.cpu.linear import MIN_WEIGHT_BYTES, can_multiply

        products = str(MIN_WEIGHT_BYTES if can_multiply() else None)
        capability = torch.backends.cpu.get_cpu_capability()
        return drafter_weights, products, host_cpu(), capability

    def loading_compiled(self) -> AbstractContextManager[None]:
        from vllm_bastion.cpu.stored_graphs import complete_when_read

        return complete_when_read()

    def install_product(
        self, layer: Any, *, drafter_weights: str, in_drafter: bool, remove_weight: bool
    ) -> bool:
        from vllm_bastion.cpu.context_kv import take_rows
        from vllm_bastion.cpu.linear import install_linear, int8_wanted

        if in_drafter:
            take_rows(layer)
        # Embeddings and heads keep their weight; a drafter's head gets int8 in `prepare_drafter`.
        # `fc` reads the target's hidden states, see `cpu.linear`.
        rounds = in_drafter and remove_weight and not getattr(layer, "prefix", "").endswith(".fc")
        rounds = rounds and int8_wanted(drafter_weights, layer.weight.dtype)
        if rounds and install_linear(layer, remove_weight, int8=True):
            return True
        return install_linear(layer, remove_weight)

    def prepare_drafter(self, model: Any, drafter_weights: str) -> None:
        from vllm_bastion.cpu import context_kv
        from vllm_bastion.cpu.linear import int8_wanted, with_int8_head

        context_kv.install(model.model)
        head = model.lm_head
        if head.tp_size == 1 and int8_wanted(drafter_weights, head.weight.dtype):
            with_int8_head(model)

    def weights_changed(self, target: Any, drafter: Any) -> None:
        from vllm_bastion.cpu.linear import repack

        repack(target, drafter)

    # ---- a step -------------------------------------------------------------------------

    def accept(
        self,
        logits: Tensor,
        draw: Draw,
        accept_path: BoundOp,
        given: tuple[Any, ...],
        *,
        every_row: bool,
        keep_processed: bool,
        is_argmax: Callable[[], bool],
    ) -> Tensor:
        """Draw tokens only at nodes on the path: each draw costs time here."""
        from bastion_kernels.cpu.walk import accept_lazily

        processed, arguments = logits, accept_path.arguments(None, *given)
        if every_row:
            processed, tokens = draw(None)
            accept_path(tokens, *given)
        elif is_argmax():
            # NumPy's argmax is the first one, as vLLM's; PyTorch's takes twice as long.
            accept_lazily(
                lambda rows: torch.from_numpy(logits[rows].float().numpy().argmax(1)), arguments
            )
        else:
            if keep_processed:
                processed = torch.empty_like(logits, dtype=torch.float32)

            def draw_rows(rows: Tensor) -> Tensor:
                scores, tokens = draw(rows)
                if keep_processed:
                    processed[rows] = scores
                return tokens

            accept_lazily(draw_rows, arguments)
        return processed

    # ---- the profile at the start ---------------------------------------------------------

    def choices(self, drafter_weights: str, dtype: torch.dtype) -> list[str]:
        from vllm_bastion.cpu.linear import can_multiply, int8_wanted

        own, threads = can_multiply() and dtype == torch.bfloat16, torch.get_num_threads()
        return [
            *["int8 drafter"] * int8_wanted(drafter_weights, dtype),
            f"{'own' if own else 'vLLM'} matrix products",
            f"{threads} thread{'s' if threads > 1 else ''}",
        ]

    def warning(self) -> str | None:
        from bastion_kernels.cpu.cache import unwritable
        from bastion_kernels.cpu.library import threads_problem

        problem = threads_problem() if torch.get_num_threads() > 1 else None
        if problem is None and (reason := unwritable()) is not None:
            problem = f"every start compiles again, because nothing can be stored: {reason}"
        return problem
