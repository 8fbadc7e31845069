"""What mkdocs.yml asks of the pages beyond Markdown."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

_MATH = re.compile(r"^```math\n(.*?)^```$", re.M | re.S)
_ROLE = re.compile(r":(?:class|func|meth|mod):(?=<code>)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn fences named math into MathML, which browsers show without a script."""
    return _MATH.sub(
        lambda found: f'<div class="math">{convert(found[1], display="block")}</div>', markdown
    )


def on_page_content(html: str, **_: Any) -> str:
    """Take the roles of docstrings away; the name that follows is shown as code."""
    return _ROLE.sub("", html)
