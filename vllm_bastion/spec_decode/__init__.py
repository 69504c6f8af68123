# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with trees: what drafts, chooses and verifies their nodes."""
