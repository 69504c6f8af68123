# SPDX-License-Identifier: Apache-2.0
"""The platform interface: every decision that differs between a GPU engine and a CPU engine.

`Host` is the GPU's side and the default. `vllm_bastion.cpu.host.CpuHost` overrides what a CPU does
differently, and `vllm_bastion.platform.current_host` picks one of them. `policy`, which imports no
vLLM, reads a device's type itself where it measures the device.

The methods import what they need when they are called: the configuration asks this module in
processes that must not import vLLM's model runner.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bastion_kernels.bound import BoundOp

# Draws a token for the given rows of the step's logits, or for all rows: rows [A] int64 or None ->
# processed logits [A, V] and tokens [A] int64.
Draw = Callable[[Tensor | None], tuple[Tensor, Tensor]]


class Host:
    """An engine on a GPU."""

    # Whether the device runs while the host prepares the next step. Reading a value from the
    # device then makes both wait.
    runs_ahead = True
    # N where the user names none. The paper's adaptive trees have 139 (Qwen3-8B) and 202 (4B) nodes
    # on average on an A100.
    default_nodes = 255
    # Whether vLLM can turn a drafter's weights into float8 when it loads them.
    serves_float8_products = True

    # ---- what the host can serve --------------------------------------------------------

    def serves_gated_delta(self) -> bool:
        """Whether gated delta layers can verify trees."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_cuda())

    def tree_backend(self, backend: type[Any]) -> type[Any]:
        """The tree-capable attention backend in place of vLLM's choice; the cache's layout stays.

        Raises:
            ValueError: there is none for `backend`.
        """
        if backend.get_name() == "FLASH_ATTN":
            from vllm_bastion.attention.cuda import TreeFlashAttentionBackend

            return TreeFlashAttentionBackend
        raise ValueError(
            f'method "bastion" has no tree attention for the backend {backend.get_name()}: leave '
            "attention_config.backend unset, or, if vLLM chose it for a float8 cache, set "
            'kv_cache_dtype to "auto"'
        )

    def default_attention_backend(self) -> Any | None:
        """The `AttentionBackendEnum` to use where the user named none; None = vLLM's choice.

        vLLM prefers FlashInfer on some GPUs. Tree attention replaces FlashAttention only.
        """
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum.FLASH_ATTN if current_platform.is_cuda() else None

    # ---- the worker's start -------------------------------------------------------------

    def needs_replacements(self) -> bool:
        """Whether Model Runner V2 needs native functions in place of vLLM's Triton kernels.

        They are compiled when they are first called.
        """
        return False

    def compile_factors(self, drafter_weights: str) -> tuple[str, ...]:
        """What compiled models depend on besides vLLM's own factors.

        drafter_weights: the setting `bastion_drafter_weights`.
        """
        return ()

    def loading_compiled(self) -> AbstractContextManager[None]:
        """Within it vLLM loads the models that an earlier start compiled."""
        return nullcontext()

    def install_product(
        self, layer: Any, *, drafter_weights: str, in_drafter: bool, remove_weight: bool
    ) -> bool:
        """Replace the matrix product of a linear layer. Returns False to leave it to vLLM.

        in_drafter: the layer belongs to the drafter. remove_weight: nothing else reads the weight.
        """
        return False

    def prepare_drafter(self, model: Any, drafter_weights: str) -> None:
        """Adapt a drafter whose weights have just been loaded."""

    def weights_changed(self, target: Any, drafter: Any) -> None:
        """Renew the host's own copies of weights that have been updated in place."""

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
        """Draw tokens and follow them down the trees.

        Args:
            logits: [L, V] of the step.
            draw: draws a row's token.
            accept_path: the op; its first argument is the tokens.
            given: its other arguments.
            every_row: a processor needs all rows, so all of them are drawn.
            keep_processed: the caller reads the returned logits on accepted paths.
            is_argmax: whether every token is the argmax of its unprocessed row.

        Returns:
            Processed logits [L, V], valid on the accepted paths if `keep_processed`.
        """
        processed, tokens = draw(None)
        accept_path(tokens, *given)
        return processed

    # ---- the profile at the start ---------------------------------------------------------

    def choices(self, drafter_weights: str, dtype: torch.dtype) -> list[str]:
        """What this host chose for an engine, for the log; dtype: of the models."""
        return []

    def warning(self) -> str | None:
        """Why steps are slower than they could be on this host, for the log; else None."""
        return None
