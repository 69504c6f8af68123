# SPDX-License-Identifier: Apache-2.0
"""What trees cannot serve is refused before the engine exists, in one sentence with the way out.

A start and `vllm-bastion check` both make their config with `EngineArgs.create_engine_config`,
whose wrapper (`hooks/engine_args.py`) calls each check as soon as what it reads exists:

arguments  the keys of `speculative_config` and vLLM's own options
models     the target and the drafter's checkpoint
engine     the finished VllmConfig, and the layers of the loaded target

What vLLM validates itself is left to vLLM.
"""


class BastionConfigError(ValueError):
    """A configuration that method "bastion" refuses."""
