# SPDX-License-Identifier: Apache-2.0
"""Layers that carry a state from token to token, over the rows of a tree."""
