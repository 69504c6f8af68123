# SPDX-License-Identifier: Apache-2.0
"""Run vLLM engines in processes of their own: for the benchmarks and the end-to-end tests.

`process` starts and ends such a process, `engine` configures an engine and its requests, `driver`
decodes with one and times its steps, which `steps` counts.

Engines in one process would share global state. One that runs without the plugin must not import
it, and vLLM is imported in the engines' processes alone.
"""
