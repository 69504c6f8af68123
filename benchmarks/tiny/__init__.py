# SPDX-License-Identifier: Apache-2.0
"""The tiny pair, its other drafters, and their models in plain torch: see README.md."""
