# SPDX-License-Identifier: Apache-2.0
"""What a drafter's checkpoint says without its weights. Nothing here imports vLLM.

drafter_types  the types of drafters that trees are grown from
rules          what the config of each type must have
weights        which tensors its files must have
"""
