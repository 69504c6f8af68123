# SPDX-License-Identifier: Apache-2.0
"""New weights for a running engine, in every way that vLLM offers on this host.

vLLM's own transports need a GPU. `FileTransfer` is registered beside them as a trainer's own would
be, and drives vLLM's loading as they do, from a file. The tests name the files, and the way, in
`additional_config`; a probe updates the engine when the first batch is done.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def vary(source: str, folder: Path, by: float, seed: int) -> str:
    """A copy of a checkpoint with noise on every weight, `by` times its standard deviation."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(seed)
    varied = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * by
        varied[name] = (weight.float() + noise).to(weight.dtype)
    save_file(varied, folder / WEIGHTS, metadata={"format": "pt"})
    return str(folder)


def register() -> None:
    """Setup: add `FileTransfer` to vLLM's weight transfer engines."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Nothing(WeightTransferInitInfo):
        pass

    @dataclass
    class Part(WeightTransferUpdateInfo):
        path: str
        part: int = 0
        parts: int = 1

    class FileTransfer(WeightTransferEngine[Nothing, Part]):
        init_info_cls, update_info_cls = Nothing, Part

        def init_transfer_engine(self, init_info: Nothing) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def receive_weights(self, update_info: Part) -> None:
            weights = sorted(load_file(Path(update_info.path) / WEIGHTS).items())
            self.model.load_weights(weights[update_info.part :: update_info.parts])

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine("file", FileTransfer)


def of_every_size() -> None:
    """Setup: use our products for the pair's small weights too."""
    from vllm_bastion.cpu import linear

    linear.MIN_WEIGHT_BYTES = 0


def update(session: Any) -> list[Any]:
    """Probe: update the weights once, when the first batch is done.

    Returns whether replies were kept for n-gram drafts, before and after it.
    """
    wish = session.runner.vllm_config.additional_config
    if session.engine.has_unfinished_requests() or wish.get("done"):
        return []
    session.drain()
    ngram = session.runner.runtime.trees.ngram
    kept = [ngram is not None and bool(ngram._ring_groups.any())]
    _update(session.llm, wish["way"], wish["path"])
    kept += [ngram is not None and bool(ngram._ring_groups.any())]
    session.llm.reset_prefix_cache()
    wish["done"] = True
    return [kept]


def _update(llm: Any, way: str, path: str) -> None:
    if way == "reload":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    elif way == "in place":
        _in_place(llm, path)
    else:
        llm.init_weight_transfer_engine({"init_info": {}})
        if way == "drafter":
            llm.start_draft_weight_update()
        else:
            llm.start_weight_update()
        for info in in_parts(path):
            llm.update_weights({"update_info": info})
        llm.finish_weight_update()


def in_parts(path: str, parts: int = 3) -> list[dict[str, Any]]:
    """What is sent for each part of a checkpoint."""
    return [{"path": path, "part": part, "parts": parts} for part in range(parts)]


def _in_place(llm: Any, path: str) -> None:
    """Write only the embeddings, as vLLM has them: `is_checkpoint_format` false."""
    name = "model.embed_tokens.weight"
    rows = load_file(Path(path) / WEIGHTS)[name]
    llm.collective_rpc(
        "reload_weights", kwargs={"weights_iterator": [(name, rows)], "is_checkpoint_format": False}
    )
