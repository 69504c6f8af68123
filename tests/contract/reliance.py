# SPDX-License-Identifier: Apache-2.0
"""A row of the contract: what files of ours rely on in one symbol of vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reliance:
    """What files of ours rely on in one class, module or function of vLLM."""

    target: str
    """`package.module:Class`, `package.module:Class.method`, `package.module:function` or module"""
    files: str
    """Files below vllm_bastion that rely on it, with blanks between them."""
    why: str = ""
    """What `body` is needed for."""
    methods: tuple[str, ...] = ()
    """Methods that we call or override, as `name(first, parameters)`."""
    names: str = ""
    """Attributes, private ones included, that we read, set or call, with blanks between them."""
    body: tuple[str, ...] = ()
    """Pieces of the function's source that must appear in this order."""
    whole_body: bool = False
    """Whether our code was written beside the whole function, see `contract.fingerprints`."""
    needs: str | None = None
    """The field of `Capabilities` without which vLLM does not have it."""
