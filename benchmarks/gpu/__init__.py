# SPDX-License-Identifier: Apache-2.0
"""Timings that need a GPU: the device ops, and a step of vLLM."""
