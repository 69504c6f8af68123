# SPDX-License-Identifier: Apache-2.0
"""The tiny pair, its other drafters, and how they were trained: see README.md."""
