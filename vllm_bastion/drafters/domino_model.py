# SPDX-License-Identifier: Apache-2.0
"""The model of a Domino drafter: vLLM's DFlash with a head that vLLM does not have.

It is registered with vLLM under the names in its row of `checkpoints.kinds`. vLLM inspects a
registered model in a process of its own, so this module imports vLLM's model alone, and no
speculator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from bastion_kernels import PrefixHead

# Of the head, in SpecForge's names; the speculators library puts a prefix before them.
_PARTS = ("prefix_gru.", "embed_proj.")
_NAMES = (
    "prefix_gru.weight_ih_l0",
    "prefix_gru.weight_hh_l0",
    "embed_proj.0.weight",
    "embed_proj.2.weight",
)
# Weights that training alone needs.
_OF_TRAINING = ("t2d", "verifier_norm", "verifier_lm_head")


class _Weights(nn.Module):
    """Parameters without a product of their own; shapes by name."""

    def __init__(self, dtype: torch.dtype, **shapes: tuple[int, int]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            empty = torch.empty(*shape, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))


class DominoQwen3Model(DFlashQwen3Model):
    """DFlash's backbone and Domino's head; every rank of a tensor-parallel group has all of it."""

    def __init__(self, *, vllm_config: Any, start_layer_id: int = 0, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        config, settings = self.config, self.config.dflash_config
        hidden, state = config.hidden_size, settings["gru_hidden_dim"]
        rank, dtype = settings["emb_dim"], vllm_config.model_config.dtype
        vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.prefix_gru = _Weights(
            dtype, weight_ih_l0=(3 * state, hidden), weight_hh_l0=(3 * state, state)
        )
        self.embed_proj = nn.ModuleDict(
            {
                "0": _Weights(dtype, weight=(rank, hidden + state)),
                "2": _Weights(dtype, weight=(vocab, rank)),
            }
        )


class DominoQwen3ForCausalLM(DFlashQwen3ForCausalLM):
    """A Domino drafter in SpecForge's format or in the speculators library's."""

    model_cls = DominoQwen3Model
    # The weights that `recurrent_lattice` multiplies; None until first used.
    _prepared: tuple[Tensor, ...] | None = None

    def prepared_head(self) -> tuple[Tensor, ...]:
        """`PrefixHead.prepared`, in the same tensors at every call; see `renew_head`."""
        if self._prepared is None:
            self._prepared = self.prefix_head().prepared()
        return self._prepared

    def renew_head(self) -> None:
        """Prepare the head again, after its weights were written in place."""
        for old, new in zip(self.prepared_head(), self.prefix_head().prepared(), strict=True):
            old.copy_(new)

    def prefix_head(self) -> PrefixHead:
        """The head's weights."""
        gru, project = self.model.prefix_gru, self.model.embed_proj
        return PrefixHead(
            weight_ih=gru.weight_ih_l0.data,
            weight_hh=gru.weight_hh_l0.data,
            first=project["0"].weight.data,
            last=project["2"].weight.data,
            corrected_from=self.config.dflash_config["pure_draft_prefix_len"],
        )

    def map_draft_to_target(self, ids: Tensor) -> Tensor:
        """Integer token ids of the drafter's vocabulary -> the target's, of the same dtype."""
        offsets = self.draft_id_to_target_id
        return ids if offsets is None else ids + offsets[ids.long()].to(ids.dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As DFlash's, with the head under SpecForge's names; an update may have a part of them."""
        renamed: dict[str, Tensor] = {}
        for name, weight in weights:
            if any(part in name for part in _OF_TRAINING):
                continue
            part = next((part for part in _PARTS if part in name), None)
            renamed[name if part is None else name[name.index(part) :]] = weight
        missing = [name for name in _NAMES if name not in renamed]
        if missing and self._prepared is None:
            raise ValueError(
                f'drafter "{self.draft_model_config.model}" says that it has a Domino head, and '
                f"has no {missing[0]}: use a complete checkpoint"
            )
        super().load_weights(renamed.items())
