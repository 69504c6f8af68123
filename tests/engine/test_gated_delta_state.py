# SPDX-License-Identifier: Apache-2.0
"""The adapters for gated delta networks, and what they assume of vLLM beyond the patch table."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from bastion_kernels import StateBlocks
from vllm_bastion.attention.gated_delta import (
    GatedDeltaTreeMetadata,
    TreeRows,
    allocate,
    run_tree_rows,
)
from vllm_bastion.engine.gated_delta import GatedDeltaModelState
from vllm_bastion.engine.recurrent_states import RecurrentStates
from vllm_bastion.hooks import gated_delta

HEADS, KEY_HEADS, DIM, WIDTH, TAPS = 4, 2, 16, 32, 4
CHANNELS = 2 * KEY_HEADS * DIM + HEADS * WIDTH


def make_layer(on_cpu: bool) -> Any:
    """What is read of a layer, with states of three blocks, in its CPU or its CUDA version."""
    g = torch.Generator().manual_seed(0)
    conv_state = torch.randn(3, TAPS - 1, CHANNELS, generator=g)
    state = torch.randn(3, HEADS, DIM, WIDTH, generator=g)
    # a CPU's states are [H, K, V], whatever their shape says
    held = state.view(3, HEADS, WIDTH, DIM) if on_cpu else state.mT.contiguous()
    layer = SimpleNamespace(
        num_v_heads=HEADS, num_k_heads=KEY_HEADS, head_k_dim=DIM, head_v_dim=WIDTH,
        conv_dim=CHANNELS, tp_size=1, prefix="layer", kv_cache=(conv_state, held),
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, TAPS, generator=g)),
        A_log=torch.rand(HEADS, generator=g), dt_bias=torch.rand(HEADS, generator=g),
        forward_cpu=1, forward_cuda=2, _forward_method=1 if on_cpu else 2,
    )  # fmt: skip
    return layer


class Step:
    """A tree of three rows, a prompt of two (in `with_prompt`), a chain of two."""

    def __init__(self, with_prompt: bool) -> None:
        g = torch.Generator().manual_seed(1)
        lengths = [3, 2, 2] if with_prompt else [3, 2]
        rows = sum(lengths)
        self.ours = [0, 1, 2, 5, 6] if with_prompt else [0, 1, 2, 3, 4]
        # the same rows of ours in both
        self.given = [torch.full((rows, n), 9.0) for n in (CHANNELS, HEADS, HEADS)]
        for x in self.given:
            x[self.ours] = torch.randn(5, x.shape[1], generator=g)
        reqs = len(lengths)
        trees = SimpleNamespace(
            tail_lens=torch.tensor([3] + [0] * (reqs - 1), dtype=torch.int32),
            step_slots=torch.tensor([0] + [-1] * (reqs - 1)),
            parents=torch.tensor([[0, 0]], dtype=torch.int32),
            bits=torch.tensor([[[1], [3], [5]]], dtype=torch.int32),
        )
        mine = [3, 0, 2] if with_prompt else [3, 2]
        step_rows = torch.tensor(self.ours) if with_prompt else None
        self.saved = allocate([make_layer(True)], 5, torch.float32, torch.device("cpu"))
        self.rows: Any = TreeRows(
            trees,  # type: ignore[arg-type]
            F.pad(torch.tensor(mine).cumsum(0), (1, 0)).int(),
            torch.tensor([2, -1, 1] if with_prompt else [2, 1]).int(),
            step_rows,
            {"layer": self.saved.of_layer(0)},
        )
        self.out = torch.full((rows, HEADS, WIDTH), 7.0)

    def run(self, on_cpu: bool) -> Any:
        """What the layer saves."""
        run_tree_rows(make_layer(on_cpu), self.rows, *self.given, self.out)
        return self.saved.of_layer(0)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_all_versions_of_a_layer_give_the_same(on_cpu: bool) -> None:
    """vLLM's two layouts of a state; a CPU's kernel, and a GPU's ops and normalisation."""
    usual, step = Step(False), Step(True)
    expected, saved = usual.run(True), step.run(on_cpu)
    torch.testing.assert_close(step.out[step.ours], usual.out)
    assert bool((step.out[3:5] == 7).all())
    assert torch.equal(saved.conv_input, usual.given[0])
    for name in ("key", "updates", "decays"):
        torch.testing.assert_close(
            getattr(saved, name), getattr(expected, name), rtol=1e-5, atol=1e-5
        )
    assert not torch.equal(usual.out[1], usual.out[2])


def test_rows_beyond_what_steps_can_have_are_padding() -> None:
    step = Step(False)
    step.given = [F.pad(x, (0, 0, 0, 3)) for x in step.given]
    step.out = F.pad(step.out, (0, 0, 0, 0, 0, 3), value=7.0)
    step.run(False)
    assert bool((step.out[5:] == 7).all())
    assert bool((step.out[:5] != 7).all())


def test_a_step_without_drafts_accepts_the_root() -> None:
    layer = make_layer(False)
    saved = allocate([layer], 2, torch.float32, torch.device("cpu"))
    for x in saved:
        x.fill_(5.0)
    table, root_only = torch.tensor([[2]], dtype=torch.int32), torch.tensor([[0, -1]]).int()
    states = RecurrentStates(
        {"layer": layer}, {"layer": 0}, StateBlocks([table], 0), saved, 2, root_only
    )
    before = layer.kv_cache[0].clone()
    one = torch.tensor([0, 1], dtype=torch.int32)
    states.find(one, torch.tensor([9], dtype=torch.int32))
    states.commit(1, one, None)
    expected = torch.cat([before[2, 1:], saved.conv_input[0, :1]])
    assert torch.equal(layer.kv_cache[0][2], expected)
    assert torch.equal(layer.kv_cache[0][:2], before[:2])


def test_a_tree_larger_than_a_cached_block_is_refused() -> None:
    state: Any = object.__new__(GatedDeltaModelState)
    state.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=64)
    )
    state._align_mode, state._block_size = True, 64
    with pytest.raises(ValueError, match="lower it to 63, raise block_size, or set"):
        state._check_block_size()
    state._block_size = 65
    state._check_block_size()
    state._align_mode, state._block_size = False, 64
    state._check_block_size()


def metadata_of(step: Step) -> Any:
    """vLLM's, of a step with a prompt, as far as the hooks read it."""
    fields = {field.name: None for field in dataclasses.fields(GDNAttentionMetadata)}
    metadata: Any = GatedDeltaTreeMetadata(**fields, tree_rows=step.rows)
    metadata.num_actual_tokens, metadata.num_prefills = 7, 1
    metadata.spec_sequence_masks = torch.tensor([True, False, True])
    metadata.non_spec_token_indx = torch.tensor([3, 4])
    return metadata


def test_vllms_core_sees_the_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(True)
    layer, metadata = make_layer(False), metadata_of(step)
    of_layers = {"layer": metadata}
    context = SimpleNamespace(attn_metadata=of_layers)
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    seen: list[Any] = []

    def core(self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        of_layer: Any = of_layers[self.prefix]
        seen.append((of_layer.spec_sequence_masks, of_layer.num_actual_tokens, len(mixed_qkv)))
        assert isinstance(of_layer, GDNAttentionMetadata) and of_layer.tree_rows is None
        core_attn_out[:] = 5

    # a graph's padding behind the step's rows
    given = [F.pad(x, (0, 0, 0, 2)) for x in step.given]
    out = F.pad(step.out, (0, 0, 0, 0, 0, 2), value=7.0)
    gated_delta.forward_core(core, layer, *given, out)
    assert seen == [(None, 2, 2)]
    assert of_layers["layer"] is metadata
    assert bool((out[3:5] == 5).all())
    assert bool((out[7:] == 7).all())
    usual = Step(False)
    usual.run(True)
    torch.testing.assert_close(out[step.ours], usual.out)
