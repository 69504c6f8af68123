# SPDX-License-Identifier: Apache-2.0
"""The adapters between the policy and vLLM's Model Runner V2; they run in worker processes."""
