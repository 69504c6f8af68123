# SPDX-License-Identifier: Apache-2.0
"""What a CPU host needs: its build of vLLM, native twins, attention and products."""
