# SPDX-License-Identifier: Apache-2.0
"""What bastion decides, without vLLM: the trees, how many nodes to verify, whether to draft."""
