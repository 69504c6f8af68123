# SPDX-License-Identifier: Apache-2.0
"""Attention of the target over trees on CUDA, and its gated delta layers on every device."""
