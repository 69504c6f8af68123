# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a few rows on a CPU that multiplies bfloat16 pairs, without matrix registers.

Verifying 17 or 33 rows, a target's weights should be read once and in the time that one row takes.
"""
