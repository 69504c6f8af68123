# SPDX-License-Identifier: Apache-2.0
"""Rehearse on a simulated GPU: `make rehearse`, see docs/rehearsal.md."""

from __future__ import annotations

import sys

from tests.rehearsal.main import main

sys.exit(main(sys.argv[1:]))
