# SPDX-License-Identifier: Apache-2.0
"""The worker of method "bastion", a subclass of vLLM's: adapters, warm-up, weights that change."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu_worker import Worker

from vllm_bastion.config import settings_of
from vllm_bastion.hooks.table import GATED_DELTA_HOOKS, WORKER_HOOKS


class BastionWorker(Worker):
    """vLLM's worker; the model runner that it builds gets our parts."""

    def init_device(self) -> None:
        """Install the hooks of a worker, then build the model runner.

        The hooks import vLLM's GPU modules, and on a CPU the platform must be patched before.

        Raises:
            HookError: a symbol of vLLM is missing or has changed.
        """
        for hook in (*WORKER_HOOKS, *(GATED_DELTA_HOOKS if self.model_config.is_hybrid else ())):
            hook.install()
        super().init_device()
        from vllm_bastion.hooks.model_runner import adopt

        adopt(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """Compile our kernels before vLLM declares its warm-up over, and measure the step costs."""
        from vllm_bastion.engine.profile import profile, tree_step

        runner: Any = self.model_runner
        for part in (runner.model_state, runner.speculator, runner.adaptive_verification):
            part.warm_up()
        # Run the largest tree too: the trees of vLLM's warm-up requests may be smaller.
        tree_step(runner, runner.decode_query_len)
        times = super().compile_or_warm_up_model()
        profile(runner)
        return times

    def execute_dummy_batch(self) -> None:
        """Join the step of a data-parallel rank that has work, with one row in place of N + 1.

        All ranks pad their steps to the most rows of any.
        """
        runner: Any = self.model_runner
        runner._dummy_run(1, randomize_inputs=self.randomize_dummy_inputs)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Renew what depends on the target's weights, such as packed copies."""
        super().reload_weights(*args, **kwargs)
        self._weights_changed()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a drafter's weights as at the start, see `loading_drafter`."""
        with self._loading():
            super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        """Renew what depends on the weights."""
        with self._loading():
            super().finish_weight_update()
        self._weights_changed()

    def _loading(self) -> AbstractContextManager[None]:
        if not (self._weight_update_active and self._weight_update_is_draft):
            return nullcontext()
        from vllm_bastion.engine.weights import loading_drafter

        return loading_drafter(self.get_draft_model(), settings_of(self.vllm_config).method)

    def _weights_changed(self) -> None:
        from vllm_bastion.engine.runtime import runtime_of
        from vllm_bastion.engine.weights import weights_changed

        with set_current_vllm_config(self.vllm_config):
            weights_changed(self.model_runner.get_model(), self.get_draft_model())
        ngram = runtime_of(self.vllm_config).trees.ngram
        if ngram is not None:
            ngram.forget()
