# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_bastion`: the command `vllm-bastion`."""

from vllm_bastion.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
