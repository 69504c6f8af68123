# SPDX-License-Identifier: Apache-2.0
"""From the drafter's logits to a tree and a budget."""
