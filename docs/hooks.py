"""What mkdocs.yml asks of the pages beyond Markdown."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

_MATH = re.compile(r"^```math\n(.*?)^```$", re.M | re.S)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn fences named math into MathML, which browsers show without a script."""
    return _MATH.sub(
        lambda found: f'<div class="math">{convert(found[1], display="block")}</div>', markdown
    )
