# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in vLLM beyond the signatures of its hooks: one table.

tests/test_contract.py is generated from it. On a vLLM where something is gone, the test names it
and the file to look at, instead of an engine failing inside a step.
"""

from __future__ import annotations

from tests.contract.adapters import ADAPTERS
from tests.contract.cpu import CPU
from tests.contract.others import OTHERS
from tests.contract.reliance import Reliance
from tests.contract.sessions import SESSIONS

__all__ = ["CONTRACT", "UNUSED_OF_MANAGER", "Reliance"]

CONTRACT: tuple[Reliance, ...] = (*ADAPTERS, *CPU, *OTHERS, *SESSIONS)

# Members of AdaptiveVerificationManager that BastionVerificationManager inherits although it does
# not run the base constructor: nothing may call them.
UNUSED_OF_MANAGER = frozenset({"set_cost_curves"})
