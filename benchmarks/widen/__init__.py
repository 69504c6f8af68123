# SPDX-License-Identifier: Apache-2.0
"""Widen a small pair: the same function in the shape of a real model.

    python -m benchmarks.widen 0.6B                  # prints the pair's folder
    python -m benchmarks.widen 0.6B --drafters dflash2   # and a further drafter
    python -m benchmarks.widen smollm2-4B            # SmolLM2-135M at the cost of 4B
    python -m benchmarks.widen --config config.json  # the shape of any Qwen3-like config.json

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

`llama-8B` has Llama 3.1 8B's sizes but Qwen3's q and k norms. Llama has none, and the tiny pair's
cannot be folded into the projections, because they divide by the length of each query and key. With
each head's mean length instead, 86% of the argmaxes on held-out text are equal and the chain's tau
falls from 3.6 to 2.4: a different function.
"""
