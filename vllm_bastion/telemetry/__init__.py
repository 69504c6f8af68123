# SPDX-License-Identifier: Apache-2.0
"""Telemetry for operators: counts of steps and trees, from the worker to every front end.

A worker's `Recorder` makes one `StepRecord` per step and adds it to its own `Totals`. The record
travels with the step's output to the engine core, whose `Collector` adds records up and hands their
sum to a front end once a second, with vLLM's own statistics. The front end writes it to
Prometheus and to the log. Nothing here waits for the device, and nothing imports vLLM.
"""
