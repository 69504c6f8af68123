# SPDX-License-Identifier: Apache-2.0
"""Telemetry for operators: counts of steps and trees, from the engine core to every front end.

After each step the engine core adds a `StepRecord` to its `Collector`, which hands the sum to a
front end once a second, with vLLM's own statistics. The front end writes it to Prometheus and to
the log. Nothing here waits for the device, and nothing imports vLLM.
"""
