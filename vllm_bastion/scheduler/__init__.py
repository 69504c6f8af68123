# SPDX-License-Identifier: Apache-2.0
"""Decisions in the engine core: whether a step drafts, and how."""
