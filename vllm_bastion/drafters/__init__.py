# SPDX-License-Identifier: Apache-2.0
"""The speculators that propose trees, one file for each kind in `checkpoints.drafter_types`."""
