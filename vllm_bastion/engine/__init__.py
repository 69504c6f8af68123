# SPDX-License-Identifier: Apache-2.0
"""The adapters between bastion and vLLM's Model Runner V2."""
