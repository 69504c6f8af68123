# SPDX-License-Identifier: Apache-2.0
"""Time the steps of a running vLLM engine, before its first request."""
