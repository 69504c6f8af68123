# SPDX-License-Identifier: Apache-2.0
"""What bastion decides: trees, verified nodes, whether to draft. Imports no vLLM."""
