# SPDX-License-Identifier: Apache-2.0
"""The CPU versions of the ops, in Numba. A GPU process never imports this package."""
