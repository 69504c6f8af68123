# SPDX-License-Identifier: Apache-2.0
"""Run vLLM engines in processes of their own: for the benchmarks and the end-to-end tests.

`process` starts and ends such a process, `engine` configures an engine and its requests, `decoder`
decodes with one and counts its steps, `session` drives one step by step.

Each engine gets its own process because engines in one process share global state. An engine that
runs without the plugin must not import it, so nothing here imports `vllm_bastion`, and vLLM is
imported only in the engines' processes.
"""
