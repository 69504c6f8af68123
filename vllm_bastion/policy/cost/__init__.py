# SPDX-License-Identifier: Apache-2.0
"""What a step costs on this machine.

forward_times   measured forward passes, interpolated
table           cost of a whole step, from forward_times
latency         the interface of latency models
corrected       the table, corrected by real steps: the default
paper           the paper's estimators: roofline, linear calibration, moving average
models          a latency model by its name
devices         peak FLOP/s and bandwidth of a device
timing          times of real steps
"""
