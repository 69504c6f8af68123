# SPDX-License-Identifier: Apache-2.0
"""The drafters that trees are grown from: `kinds` lists them, a file each proposes the trees."""
