# SPDX-License-Identifier: Apache-2.0
"""Run vLLM engines in processes of their own: for the benchmarks and the end-to-end tests.

`process` starts and ends such a process, `engine` configures an engine and its requests, `decoder`
decodes with one and counts its steps, `driver` times them.

Engines in one process would share global state. One that runs without the plugin must not import
it, and vLLM is imported in the engines' processes alone.
"""
