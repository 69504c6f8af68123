# SPDX-License-Identifier: Apache-2.0
"""Widen a small pair: the same function in the shape of a real model.

    python -m benchmarks.widen 0.6B                  # prints the pair's folder
    python -m benchmarks.widen 0.6B --drafters dflash2   # and a further drafter
    python -m benchmarks.widen smollm2-4B            # SmolLM2-135M at the cost of 4B

The pair then accepts as the small pair does, and a step costs what the shape costs, because
every matrix has its full size. Pairs (target/, drafter/, pair.json) are written once, to
`$XDG_CACHE_HOME/vllm-bastion/pairs` and never to the repository. With h, d the tiny hidden and head
sizes and H, D the wide ones:

- Channels are padded with zeros, so the mean square in a norm shrinks by h/H. The weights of hidden
  norms are multiplied by sqrt(h/H) and eps by h/H (exact for h/H, nearly for d/D).
- The tiny head's rotary pairs keep their frequencies with theta^(D/d); its halves start at 0 and
  D/2.
- The weights of k norms are multiplied by sqrt(d/D). Those of q norms stay: the same factor is
  cancelled by sqrt(D/d), because attention divides by sqrt(D). SmolLM2 is a Llama and has no such
  norms: its queries are multiplied by sqrt(D/d), which bf16 rounds.
- A KV head is repeated if a wide group has fewer queries than a tiny one.
- Layers beyond the tiny depth add nothing: their output projections are zero. Their other weights,
  and all that only meet zeros, are noise: a device may draw less power, and run faster, on zeros.
- Padded vocabulary entries are never chosen: a small constant in channel h of every embedding row
  reaches the head through the final norm and meets large negative weights in the padded rows.

The drafter gets five layers and reads five of the target's, as the published ones do. DFlash2's
head gets the sizes of a published one.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bastion_kernels.cpu.cache import root as cache_dir
from benchmarks import TINY, parser_of
from benchmarks.tiny.drafter import Drafter, Selector, load_drafter
from benchmarks.tiny.model import Dims, Target, load_target

Weights = Iterator[tuple[str, Tensor]]

# Values in channel h: powers of two, exact in bf16. The constant is small compared to an embedding
# (its square is 4e-5 of the smallest mean square in a norm).
_CONSTANT, _PUSH_NORM, _PUSH_HEAD = 2.0**-7, 2.0**7, -(2.0**14)
_NOISE_STD = 0.02
_VERSION = 2
SHARD_BYTES = 1 << 30
# Sizes of a published DFlash2 head.
_SELECTOR_RANK, _CONV_TAPS, _CONV_GROUP = 256, 2, 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with a tied head, by the names of its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    drafter_layers: int = 5


# Of the tiny pair, by name.
SHAPES = {
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936),
    "4B": Shape(2560, 9728, 36, 32, 8, 128, 151936),
    # SmolLM2-135M in place of the tiny pair, with its vocabulary.
    "smollm2-4B": Shape(2560, 9728, 36, 32, 8, 128, 49152),
}


class Widening:
    """Maps a small pair's channels, heads and layers into a shape.

    Args:
        tiny: sizes of the small target.
        read: the layers whose outputs its drafters read.

    Raises ValueError: the small pair does not fit; the text names the size.
    """

    def __init__(self, tiny: Dims, shape: Shape, read: tuple[int, ...]) -> None:
        self.tiny, self.shape = tiny, shape
        self.group = group = shape.num_attention_heads // shape.num_key_value_heads
        tiny_group = tiny.num_attention_heads // tiny.num_key_value_heads
        copies = math.ceil(tiny_group / group)
        needed = {
            "hidden_size": tiny.hidden_size,
            "intermediate_size": tiny.intermediate_size,
            "num_hidden_layers": tiny.num_hidden_layers,
            "num_key_value_heads": tiny.num_key_value_heads * copies,
            "head_dim": tiny.head_dim,
            "vocab_size": tiny.vocab_size,
        }
        for name, least in needed.items():
            if getattr(shape, name) < least:
                raise ValueError(f"{name} is {getattr(shape, name)}, the small pair needs {least}")
        self.padded = shape.vocab_size > tiny.vocab_size
        if self.padded and shape.hidden_size == tiny.hidden_size:
            raise ValueError("a padded vocabulary needs a hidden_size beyond the small pair's")
        # Indices of the tiny heads: queries [tiny NH], keys [copies, tiny NK].
        number = torch.arange(tiny.num_attention_heads)
        key, member = number // tiny_group, number % tiny_group
        self.queries = (key * copies + member // group) * group + member % group
        self.keys = torch.arange(tiny.num_key_value_heads * copies).view(-1, copies).T
        half = torch.arange(tiny.head_dim // 2)
        self.lanes = torch.cat([half, shape.head_dim // 2 + half])
        # As large as the largest matrix that is filled with it, one after another.
        entries = shape.hidden_size * max(
            shape.intermediate_size, shape.num_attention_heads * shape.head_dim
        )
        self._noise = torch.empty(entries).normal_(std=_NOISE_STD)
        self.norm_scale = math.sqrt(tiny.hidden_size / shape.hidden_size)
        self.key_scale = math.sqrt(tiny.head_dim / shape.head_dim)
        others = [i for i in range(shape.num_hidden_layers) if i not in read]
        added = max(0, shape.drafter_layers - len(read))
        # The added features only add to the cost of the drafter's input: their columns are zero.
        self.features = read + tuple(others[len(others) - added :])

    def dims(self, layers: int) -> Dims:
        own = asdict(self.shape) | {"num_hidden_layers": layers}
        del own["drafter_layers"]
        return Dims(
            **own,
            max_position_embeddings=self.tiny.max_position_embeddings,
            rms_norm_eps=self.tiny.rms_norm_eps * self.norm_scale**2,
            rope_theta=self.tiny.rope_theta ** (self.shape.head_dim / self.tiny.head_dim),
        )

    def target(self, target: Target) -> Weights:
        """The wide target's weights under Hugging Face's names."""
        rows = _pad(target.embed_tokens.weight, self.shape.vocab_size, self.shape.hidden_size)
        if self.padded:
            rows[:, self.tiny.hidden_size] = _CONSTANT
            rows[self.tiny.vocab_size :, self.tiny.hidden_size] = _PUSH_HEAD
        yield "model.embed_tokens.weight", rows
        del rows
        yield from self._layers(target, "model.layers", self.shape.num_hidden_layers)
        yield "model.norm.weight", self._final_norm(target.model.norm.weight)

    def drafter(self, drafter: Drafter, target: Target) -> Weights:
        """The wide drafter's weights under z-lab's names; `target` is the small one."""
        h, wide = self.tiny.hidden_size, self.shape.hidden_size
        fc = drafter.fc.weight.new_zeros(wide, len(self.features), wide)
        columns = drafter.fc.weight.unflatten(1, (-1, h))
        fc[:h, : columns.shape[1], :h] = columns
        yield "fc.weight", fc.flatten(1)
        yield "hidden_norm.weight", self._norm(drafter.hidden_norm.weight)
        yield from self._layers(drafter, "layers", self.drafter_layers(drafter))
        yield "norm.weight", self._final_norm(drafter.norm.weight)
        if drafter.vocabulary is not None:
            places = torch.arange(len(drafter.vocabulary))
            head = target.embed_tokens.weight[drafter.vocabulary]
            yield "lm_head.weight", _pad(head, len(places), wide)
            yield "d2t", drafter.vocabulary - places
        if drafter.head is not None:
            yield from self._selector(drafter.head, self.drafter_layers(drafter))

    def head_settings(self, drafter: Drafter) -> dict[str, Any]:
        """Entries of the wide drafter's `dflash_config` that its head changes."""
        if drafter.head is None:
            return {}
        return {
            "selector_rank": self._selector_rank(drafter.head),
            "conv_kernel_size": _CONV_TAPS,
            "conv_group_size": self._conv_group,
        }

    @property
    def _conv_group(self) -> int:
        return math.gcd(_CONV_GROUP, self.shape.hidden_size)

    @staticmethod
    def _selector_rank(head: Selector) -> int:
        return max(head.successor_codebook.shape[1], _SELECTOR_RANK)

    def _selector(self, head: Selector, layers: int) -> Weights:
        """The layers' convolutions are identities, as the tiny drafter's."""
        rank, hidden = self._selector_rank(head), self.shape.hidden_size
        for name in ("predecessor_codebook", "successor_codebook"):
            wide = _pad(getattr(head, name), self.shape.vocab_size, rank)
            yield f"{head.name}.{name}", wide
        yield (
            f"{head.name}.hidden_projection.weight",
            _pad(head.hidden_projection.weight, rank, hidden),
        )
        rows = 2 * _CONV_TAPS * hidden // self._conv_group
        for layer in range(layers):
            for part in ("attention_conv", "mlp_conv"):
                base = torch.zeros(2, _CONV_TAPS, hidden)
                base[:, 0] = 1.0
                yield f"layers.{layer}.{part}.base_kernel", base
                name = f"layers.{layer}.{part}.kernel_projection.weight"
                yield name, torch.zeros(rows, hidden)

    def drafter_layers(self, drafter: Drafter) -> int:
        return max(self.shape.drafter_layers, len(drafter.layers))

    def _layers(self, model: Target | Drafter, prefix: str, count: int) -> Weights:
        for i, layer in enumerate(model.layers):
            for name, weight in self._layer(layer):
                yield f"{prefix}.{i}.{name}", weight
        like = list(self._layer(model.layers[0])) if count > len(model.layers) else []
        for i in range(len(model.layers), count):
            for name, weight in like:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    filled = torch.zeros_like(weight)
                elif weight.dim() == 2:
                    filled = self._noise[: weight.numel()].view_as(weight)
                else:
                    # One key norm for all layers of a drafter, as vLLM's CPU kernel wants.
                    filled = weight if "k_norm" in name else torch.ones_like(weight)
                yield f"{prefix}.{i}.{name}", filled

    def _layer(self, layer: Any) -> Weights:
        shape, mlp = self.shape, layer.mlp
        yield "input_layernorm.weight", self._norm(layer.input_layernorm.weight)
        yield "post_attention_layernorm.weight", self._norm(layer.post_attention_layernorm.weight)
        for name, weight in self._attention(layer.self_attn):
            yield f"self_attn.{name}.weight", weight
        inner, hidden = shape.intermediate_size, shape.hidden_size
        for name in ("gate_proj", "up_proj"):
            wide = _pad(getattr(mlp, name).weight, inner, hidden)
            yield f"mlp.{name}.weight", self._unread(wide, self._added)
        down = _pad(mlp.down_proj.weight, hidden, inner)
        yield "mlp.down_proj.weight", self._unread(down, slice(mlp.down_proj.in_features, None))

    @property
    def _added(self) -> slice:
        """The channels that are always 0: all but the small ones, and the constant one."""
        return slice(self.tiny.hidden_size + 1, None)

    def _unread(self, weight: Tensor, columns: slice | Tensor) -> Tensor:
        """The weight with noise in columns that are multiplied by 0."""
        shape = weight[:, columns].shape
        weight[:, columns] = self._noise[: shape.numel()].view(shape)
        return weight

    def _attention(self, attention: Any) -> Weights:
        shape, h, d = self.shape, self.tiny.hidden_size, self.tiny.head_dim
        heads = (shape.num_attention_heads, shape.head_dim)
        head_norms = hasattr(attention, "q_norm")  # a Llama has none
        # Attention divides by sqrt(D). Without norms, the queries make up for it.
        scale = 1.0 if head_norms else 1.0 / self.key_scale
        q = attention.q_proj.weight.new_zeros(*heads, shape.hidden_size)
        q[self.queries[:, None], self.lanes, :h] = scale * attention.q_proj.weight.unflatten(
            0, (-1, d)
        )
        yield "q_proj", self._unread(q.flatten(0, 1), self._added)
        for name in ("k_proj", "v_proj"):
            weight = getattr(attention, name).weight.unflatten(0, (-1, d))
            out = weight.new_zeros(shape.num_key_value_heads, shape.head_dim, shape.hidden_size)
            for heads_of_copy in self.keys:
                out[heads_of_copy[:, None], self.lanes, :h] = weight
            yield name, self._unread(out.flatten(0, 1), self._added)
        o = attention.o_proj.weight.new_zeros(shape.hidden_size, *heads)
        o[:h, self.queries[:, None], self.lanes] = attention.o_proj.weight.unflatten(1, (-1, d))
        # An added query in a group of a small KV head averages its values.
        unread = torch.ones(shape.num_key_value_heads, self.group, shape.head_dim, dtype=torch.bool)
        unread[self.keys.flatten()[:, None], :, self.lanes] = False
        yield "o_proj", self._unread(o.flatten(1), unread.flatten())
        if head_norms:
            yield "q_norm", self._head_norm(attention.q_norm.weight, 1.0)
            yield "k_norm", self._head_norm(attention.k_norm.weight, self.key_scale)

    def _norm(self, weight: Tensor) -> Tensor:
        return _pad(weight * self.norm_scale, self.shape.hidden_size)

    def _final_norm(self, weight: Tensor) -> Tensor:
        out = self._norm(weight)
        if self.padded:
            out[self.tiny.hidden_size] = _PUSH_NORM
        return out

    def _head_norm(self, weight: Tensor, scale: float) -> Tensor:
        out = weight.new_zeros(self.shape.head_dim)
        out[self.lanes] = weight * scale
        return out


def _pad(weight: Tensor, *sizes: int) -> Tensor:
    out = weight.new_zeros(sizes)
    out[tuple(slice(size) for size in weight.shape)] = weight
    return out


def make_pair(
    shape: Shape,
    folder: Path,
    source: Path = TINY,
    shard_bytes: int = SHARD_BYTES,
    kinds: Sequence[str] = ("target", "drafter"),
) -> None:
    """Write `folder`/target and `folder`/drafter.

    Args:
        source: the pair to widen, with a folder for each of `kinds`.
        kinds: "target", and folders of drafters.

    Raises:
        ValueError: the shape is too small.
    """
    torch.manual_seed(0)
    target = load_target(source / "target")
    wide = Widening(target.dims, shape, target.feature_layers)
    for kind in kinds:
        config, out = read_config(source / kind), folder / kind
        if kind == "target":
            weights, layers = wide.target(target), shape.num_hidden_layers
            config["tie_word_embeddings"] = True
        else:
            drafter = load_drafter(source / kind)
            weights, layers = wide.drafter(drafter, target), wide.drafter_layers(drafter)
            settings = {"target_layer_ids": list(wide.features), **wide.head_settings(drafter)}
            config |= {
                "num_target_layers": shape.num_hidden_layers,
                "layer_types": ["full_attention"] * layers,
                "max_window_layers": layers,
                "dflash_config": config["dflash_config"] | settings,
            }
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(source / kind, out, ignore=shutil.ignore_patterns("*.safetensors"))
        with torch.inference_mode():
            write_weights(weights, out, shard_bytes)
        config |= asdict(wide.dims(layers))
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def pair_of(name: str, shape: Shape | None = None, kinds: Sequence[str] = ()) -> Path:
    """The cached pair of a known shape or of `shape`, made where it is not there.

    kinds: further drafters of the pair, folders beside its source's own.

    Raises ValueError: see `make_pair`; or SmolLM2 has not been fetched.
    """
    source, shape = TINY, shape or SHAPES[name]
    if name.startswith("smollm2-"):
        source = cache_dir() / "pairs" / "smollm2"
        if not (source / "drafter").exists():
            raise ValueError(f"{name} is SmolLM2, widened: run python -m benchmarks.smollm2 first")
    folder = cache_dir() / "pairs" / name
    for own in (("target", "drafter"), *((kind,) for kind in kinds)):
        files = sorted(path for kind in own for path in source.glob(f"{kind}/*"))
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        made_of = {"version": _VERSION, "source": digest, "shape": asdict(shape)}
        note = folder / ("pair.json" if "target" in own else f"{own[0]}.json")
        if note.exists() and json.loads(note.read_text()) == made_of:
            continue
        if "target" in own:  # its further drafters belong to the old one
            shutil.rmtree(folder, ignore_errors=True)
        part = folder.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        make_pair(shape, part, source, kinds=own)
        folder.mkdir(exist_ok=True)
        for kind in own:
            shutil.rmtree(folder / kind, ignore_errors=True)
            (part / kind).rename(folder / kind)
        part.rmdir()
        note.write_text(json.dumps(made_of, indent=1) + "\n")
    return folder


def write_weights(weights: Weights, folder: Path, shard_bytes: int) -> None:
    """Write bf16 safetensors in shards of about `shard_bytes`, with at most one in memory."""
    place: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = number = 0

    def flush() -> None:
        nonlocal number
        number += 1
        path = folder / f"model-{number:05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        place.update(dict.fromkeys(shard, path.name))
        shard.clear()

    for name, weight in weights:
        kind = torch.bfloat16 if weight.is_floating_point() else weight.dtype
        shard[name] = weight.detach().to(kind).contiguous().clone()
        total += shard[name].nbytes
        if sum(one.nbytes for one in shard.values()) >= shard_bytes:
            flush()
    if shard:
        flush()
    if number == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def main() -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--drafters", nargs="*", default=[], choices=("dflash2",), help="further")
    given = parser.parse_args()
    try:
        print(pair_of(given.name, kinds=given.drafters))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
