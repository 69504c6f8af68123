# SPDX-License-Identifier: Apache-2.0
"""The table of keys in docs/configuration.md: `python tests/config_table.py`."""

from __future__ import annotations

import json
from dataclasses import fields

from vllm.config.utils import get_attr_docs

from vllm_bastion.config import BastionSpeculativeConfig, key_adapter, user_keys


def markdown_table() -> str:
    """The table of keys in `docs/configuration.md`."""
    docs = get_attr_docs(BastionSpeculativeConfig)
    defaults = {field.name: field.default for field in fields(BastionSpeculativeConfig)}
    lines = ["| Key | Default | Meaning |", "|---|---|---|"]
    for name in user_keys():
        values = []
        schema = key_adapter(name).json_schema()
        for choice in schema.get("anyOf", [schema]):
            words = choice.get("enum", [choice["const"]] if "const" in choice else [])
            values += [f"`{word}`" for word in words]
            values += ["a number"] * (choice.get("type") == "integer")
        shown = f"`{json.dumps(defaults[name])}`"
        help_text = " ".join(docs[name].split())
        choices = f" ({', '.join(values)})" if values != ["a number"] and values else ""
        lines.append(f"| `{name}` | {shown} | {help_text}{choices} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
