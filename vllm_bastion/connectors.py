# SPDX-License-Identifier: Apache-2.0
"""Which KV connectors may read the cache of an engine that verifies trees.

Between the target's forward pass and the end of a step, the cache holds the keys and values of
nodes that are not accepted. vLLM's runner lets a connector save at the end of the step
(`wait_for_save`) and when a request has finished, when accepted rows lie where they belong. A
connector that also saves layer by layer inside the forward pass would store rejected rows.
"""

from __future__ import annotations

from typing import Any

# What vLLM calls on a connector between the target's layers and the end of the step.
_TOO_EARLY = ("save_kv_layer", "finish_forward")


def saving_too_early(config: Any) -> str | None:
    """The name of the first connector that may save before nodes are rejected; None if none does.

    config: vLLM's KVTransferConfig. A method that names nothing does nothing; any other may save. A
    MultiConnector is as sound as what it consists of. A connector whose package is missing is left
    to vLLM, which cannot start it.
    """
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if config.kv_connector == "MultiConnector":
        parts = config.kv_connector_extra_config.get("connectors") or []
        found = (saving_too_early(KVTransferConfig(**part)) for part in parts)
        return next((name for name in found if name is not None), None)
    try:
        connector = KVConnectorFactory.get_connector_class(config)
    except ImportError:
        return None
    methods = (getattr(connector, name) for name in _TOO_EARLY)
    early = any(method.__code__.co_names for method in methods)
    return str(config.kv_connector) if early else None
