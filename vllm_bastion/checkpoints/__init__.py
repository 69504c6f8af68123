# SPDX-License-Identifier: Apache-2.0
"""What checkpoints say without their weights. Nothing here imports vLLM.

files     a model's config.json, and the headers of its files
kinds     the kinds of drafters that trees are grown from, and drafters that are refused by name
rules     what the config of each kind must have
weights   which tensors a drafter must have, and their shapes
"""
