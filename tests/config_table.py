# SPDX-License-Identifier: Apache-2.0
"""The table of keys in docs/configuration.md: `python tests/config_table.py`."""

from __future__ import annotations

import json
from dataclasses import fields

from vllm.config.utils import get_attr_docs

from vllm_bastion.config import BastionSpeculativeConfig, key_choices, literals, user_keys


def markdown_table() -> str:
    """The table of keys in `docs/configuration.md`."""
    docs = get_attr_docs(BastionSpeculativeConfig)
    defaults = {field.name: field.default for field in fields(BastionSpeculativeConfig)}
    lines = ["| Key | Default | Meaning |", "|---|---|---|"]
    for name in user_keys():
        values = []
        for choice in key_choices(name):
            values += [f"`{value}`" for value in literals(choice)]
            values += ["a number"] * (choice.get("type") == "integer")
        shown = f"`{json.dumps(defaults[name])}`"
        help_text = " ".join(docs[name].split())
        choices = f" ({', '.join(values)})" if values != ["a number"] and values else ""
        lines.append(f"| `{name}` | {shown} | {help_text}{choices} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
