# SPDX-License-Identifier: Apache-2.0
"""Explain one recorded step: why N* nodes, which ones, and what the target accepted.

    python -m benchmarks.replay.explain RECORDING.npz --step 12 [--tokenizer MODEL] [--out FOLDER]

The tree is the engine's (built by its own op), the decision the controller's on the profile's
costs, and the outcome the recorded one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.replay.controller import ScoreOrder, best_size, order_scores, speedup_curve
from benchmarks.replay.draft_tree import DraftTree, best_first
from benchmarks.replay.figures import step_figure
from benchmarks.replay.recording import Recording, load_recording
from vllm_bastion.cli.profile import newest_profile
from vllm_bastion.policy.cost.latency import LatencyModel
from vllm_bastion.policy.cost.paper import CurveLatency
from vllm_bastion.policy.cost.store import read_profile
from vllm_bastion.policy.cost.table import CostArray

TokenText = Callable[[int], str]


@dataclass(frozen=True)
class Explanation:
    """A step and its decision."""

    title: str
    root_token: int
    bonus_token: int
    tree: DraftTree
    order: ScoreOrder
    cost_ms: CostArray
    num_verified: int
    # Node numbers of the accepted path, without the root.
    path: list[int]

    @property
    def accepted(self) -> list[int]:
        """The accepted draft tokens."""
        return [int(self.tree.tokens[0, node - 1]) for node in self.path]


def explain_step(
    recording: Recording, step: int, latency: LatencyModel, max_nodes: int
) -> Explanation:
    """Rebuild one recorded step as a batch of one.

    Raises:
        ValueError: there is no such step.
    """
    if not 0 <= step < recording.num_steps:
        raise ValueError(f"step {step} is not among the {recording.num_steps} recorded ones")
    tree = best_first(
        torch.from_numpy(recording.topk_tokens[step : step + 1].astype(np.int32)),
        torch.from_numpy(recording.scores[step : step + 1].astype(np.float32)),
        max_nodes,
    )
    tree = tree.prefix(int(tree.num_nodes[0]))
    log_rho = tree.log_rho.double().numpy()
    q, p = int(recording.step_requests[step]), int(recording.step_positions[step])
    cost = latency.estimate(1, float(recording.context_lens[step])).tree_ms
    order = order_scores(np.exp(log_rho), [log_rho.shape[1]])
    verified = best_size(speedup_curve(order, cost, 1))
    truth = tuple(recording.continuation(step).tolist())
    number = {path: node for node, path in enumerate(tree.prefix(verified).paths())}
    path: list[int] = []
    while truth[: len(path) + 1] in number:
        path.append(number[truth[: len(path) + 1]])
    start = int(recording.token_offsets[q])
    return Explanation(
        title=f"request {recording.request_ids[q]} ({recording.domains[q]}), position {p}",
        root_token=int(recording.tokens[start + p - 1]),
        bonus_token=truth[len(path)],
        tree=tree,
        order=order,
        cost_ms=cost,
        num_verified=verified,
        path=path,
    )


def explanation_text(step: Explanation, text: TokenText = str) -> str:
    """S(N), A-hat(N) and C(N) of some sizes, the verified tree and the accepted path."""
    curve = speedup_curve(step.order, step.cost_ms, 1)
    last = len(curve) - 1
    sizes = sorted({0, 1, step.num_verified, last, *(n for n in _powers(last))})
    lines = [step.title, "", "     N   A-hat(N)    C(N) ms   S(N) tokens/ms"]
    for n in sizes:
        mark = "  <- N*" if n == step.num_verified else ""
        lines.append(
            f"{n:6d}{step.order.expected[n]:11.3f}{step.cost_ms[1 + n]:11.3f}{curve[n]:17.5f}{mark}"
        )
    tree = step.tree.prefix(step.num_verified)
    path = " ".join(repr(text(token)) for token in step.accepted)
    lines += [
        "",
        tree.render(accepted=step.path, decode=text, root=text(step.root_token)),
        "",
        f"{tree.num_nodes[0]} of {step.tree.num_nodes[0]} nodes verified, {len(step.path)} "
        f"accepted: {path or 'none'}; then {text(step.bonus_token)!r} from the target",
    ]
    return "\n".join(lines)


def _powers(last: int) -> list[int]:
    return [1 << k for k in range(1, last.bit_length()) if 1 << k <= last]


def main(argv: Sequence[str] | None = None) -> int:
    """Print one step's decision, and draw it as a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--step", type=int, default=0, help="index of the step (default 0)")
    parser.add_argument("--profile", type=Path, help="default: the newest in the cache")
    parser.add_argument("--nodes", type=int, default=63, help="N_max (default 63)")
    parser.add_argument("--tokenizer", help="model whose tokenizer turns ids into text")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the PNG")
    arguments = parser.parse_args(argv)
    try:
        profile = read_profile(arguments.profile or newest_profile())
        recording = load_recording(arguments.recording)
        latency = CurveLatency(profile.table)
        step = explain_step(recording, arguments.step, latency, arguments.nodes)
    except (OSError, ValueError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    text = _token_text(arguments.tokenizer)
    print(explanation_text(step, text))
    arguments.out.mkdir(parents=True, exist_ok=True)
    figure = arguments.out / f"step-{arguments.step}.png"
    step_figure(step.order, step.cost_ms, 1, figure)
    print(f"\ndrawn: {figure}")
    return 0


def _token_text(tokenizer: str | None) -> Callable[[int], str]:
    """A function from token ids to text, or to their numbers without a tokenizer."""
    if tokenizer is None:
        return str
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return lambda token: str(loaded.decode([token]))


if __name__ == "__main__":
    raise SystemExit(main())
