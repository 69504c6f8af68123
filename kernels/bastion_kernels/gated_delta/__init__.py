# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over the rows of a tree."""
