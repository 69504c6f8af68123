# SPDX-License-Identifier: Apache-2.0
"""The mask of a tree, and attention over it."""
