# SPDX-License-Identifier: Apache-2.0
"""A page that shows what an engine drafts, how much of it is accepted, and what it costs.

`page.html` is the whole page: styles, script and SVG, no build step and no foreign host. A server
sends it as it is, and it polls for data. `document.with_data` writes data into it, for a file.
"""
