# SPDX-License-Identifier: Apache-2.0
"""The CPU versions of the ops, in Numba and C++ (`csrc`). GPU processes never import them."""
