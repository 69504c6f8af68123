# SPDX-License-Identifier: Apache-2.0
"""From the target's samples to an accepted path, and what moves with it."""
