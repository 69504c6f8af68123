# SPDX-License-Identifier: Apache-2.0
"""Start-up checks: everything a tree cannot serve is refused before the engine exists.

Every refusal is one sentence that names the key or flag and the way out. Each check runs as soon as
what it reads exists: the user's keys (`keys`), then the target and the drafter's checkpoint
(`models`), then the finished configuration (`engine`). `engine.check_layers` looks at the loaded
target for what no configuration says.
"""


class BastionConfigError(ValueError):
    """A configuration that method "bastion" refuses."""
