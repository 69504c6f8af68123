# SPDX-License-Identifier: Apache-2.0
"""What a step costs on this machine, and whether a draft is worth it.

Only `engine`, `measure` and `tree_steps` know vLLM.
"""
