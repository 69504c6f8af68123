# SPDX-License-Identifier: Apache-2.0
"""Drafters that are refused by name, each with the reason and the nearest that works.

Names are those of a checkpoint's architecture or type, or of its format in the speculators library.
This module imports nothing of vLLM.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["other_family"]

# Pattern in the name of a checkpoint's architecture or format, in small letters -> why it is
# refused, and the nearest that works.
_PLAIN_DFLASH = "use a DFlash drafter (DFlashDraftModel) of this target"
_OTHERS: dict[str, str] = {
    "jetspec": "is a JetSpec drafter, which vLLM does not have: if it was exported in DFlash's "
    "format, name its architecture DFlashDraftModel and set dflash_config.causal to true",
    r"(\b|\d)mfd": f"is an MFD drafter, which vLLM does not have: {_PLAIN_DFLASH}",
    "ubtree": f"is a UBTree drafter, which vLLM does not have: {_PLAIN_DFLASH}, whose trees "
    "bastion grows itself",
    "dspine": "is a DSpine drafter, which vLLM does not have: use a DSpark or DFlash drafter "
    "(Qwen3DSparkModel, DFlashDraftModel) of this target",
    "peagle": "is a P-EAGLE drafter, which vLLM's Model Runner V2 does not run: "
    f'{_PLAIN_DFLASH}, or vLLM\'s method "eagle3"',
    "gemma4dspark": f"is a DSpark drafter of Gemma 4, whose head caps its scores: {_PLAIN_DFLASH}",
    "qwen3omnidspark": "is a DSpark drafter of Qwen3-Omni, for which vLLM requires "
    "num_speculative_tokens to be the block size, and here it is the size of a tree: use vLLM's "
    'method "dspark"',
    "dflashlaguna": "is a DFlash drafter of Laguna, whose layers differ from the ones that trees "
    'were tested with: use vLLM\'s method "dflash"',
    "dsparkdraft": "is a DSpark drafter of DeepSeek, which has latent attention and lies in the "
    "target's checkpoint: use a target with a Qwen3DSparkModel",
    "dsparkv41": "is a DSpark drafter of DeepSeek, which has latent attention and lies in the "
    "target's checkpoint: use a target with a Qwen3DSparkModel",
    "musespark": "is a DSpark drafter of Muse Spark, whose layers differ from the ones that trees "
    'were tested with: use vLLM\'s method "dspark"',
    "dflash2beam": "is Beam's DFlash2 drafter, whose layers differ from the ones that trees were "
    'tested with: use vLLM\'s method "dflash"',
    "k3dspark": "is a DSpark drafter with latent attention: use a target with a Qwen3DSparkModel",
    "eagle": "is an EAGLE drafter, which drafts one token after the other: "
    f'{_PLAIN_DFLASH}, or vLLM\'s method "eagle3"',
    "medusa": f"is a Medusa drafter, whose heads ignore each other: {_PLAIN_DFLASH}, or vLLM's "
    'method "medusa"',
    "mtp": "is a target's own multi-token prediction (MTP), which drafts one token after the "
    f'other: {_PLAIN_DFLASH}, or vLLM\'s method "mtp"',
    "mlpspeculator": "is an MLP speculator, which drafts one token after the other: "
    f'{_PLAIN_DFLASH}, or vLLM\'s method "mlp_speculator"',
}


def other_family(config: Any) -> str | None:
    """Why a drafter of another family is refused, and the nearest that works; None: not known.

    Args:
        config: the checkpoint's Hugging Face config, or the speculators library's as a dictionary.
    """
    if not isinstance(config, dict):
        config = {
            "architectures": getattr(config, "architectures", None),
            "model_type": getattr(config, "model_type", None),
            "parallel_drafting": getattr(config, "parallel_drafting", None),
        }
    names = [*(config.get("architectures") or ())]
    names += [config.get(key) or "" for key in ("model_type", "speculators_model_type")]
    if config.get("parallel_drafting"):  # in the config of an EAGLE-3 drafter
        names.append("peagle")
    text = " ".join(names).lower().replace("-", "").replace("_", "")
    return next((why for pattern, why in _OTHERS.items() if re.search(pattern, text)), None)
