# SPDX-License-Identifier: Apache-2.0
"""BASTION for vLLM: speculative decoding with budget-adaptive draft trees."""

__version__ = "0.1.0"
