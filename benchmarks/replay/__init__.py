# SPDX-License-Identifier: Apache-2.0
"""Budget policies on recorded steps, and the studies that do not ship with the plugin."""
