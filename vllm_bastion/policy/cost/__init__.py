# SPDX-License-Identifier: Apache-2.0
"""What a step costs on this machine.

devices         peak FLOP/s and bandwidth of a device
roofline        analytical cost of a forward pass
forward_times   measured forward passes, interpolated
table           cost of a whole step, from forward_times
fit             a roofline, calibrated to measurements
latency         the interface of latency models
corrected       the table, corrected by real steps: the default
paper           the paper's estimators
models          a latency model by its name
timing          times of real steps
store           profiles on disk
"""
