# SPDX-License-Identifier: Apache-2.0
"""What a CPU host needs: its build of vLLM, Triton's interpreter, the noise of a draw."""
