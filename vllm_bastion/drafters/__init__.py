# SPDX-License-Identifier: Apache-2.0
"""The speculators that propose trees, one file for each type in `checkpoints.drafter_types`."""
