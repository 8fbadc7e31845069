"""Griffe extension: what pages show of docstrings, where numpy's style and Markdown differ."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, DocstringSectionKind, Extension, Function, Module, Object

_MARKER = re.compile(r"::$", re.M)
_TABLE = re.compile(r"^( *)(=+(?: +=+)+)\n(.*?)\n\1\2\n(.*?)\n\1\2$", re.M | re.S)
_ROLE = re.compile(r":(?:class|func|meth|mod):(?=`)")
_CODE_OR_STAR = re.compile(r"(`+).*?\1|(?<=\w)\*(?=\w)", re.S)


def _as_markdown(text: str) -> str:
    """Rewrite what is reStructuredText, and join names that a backslash continued."""
    text = re.sub(r", {2,}", ", ", _MARKER.sub(":", _ROLE.sub("", text)))
    text = _TABLE.sub(r"\1```text\n\3\n\4\n\1```", text)
    return _CODE_OR_STAR.sub(lambda found: found[0] if found[0] != "*" else r"\*", text)


def _correct_parameters(item: Class | Function) -> None:
    """Take defaults, and types that the docstring does not give, from the signature."""
    docstring = item.docstring
    assert docstring is not None
    heads = [line.split(" : ")[0] for line in docstring.lines if " : " in line]
    typed = {name.strip() for head in heads for name in head.split(",")}
    for section in docstring.parsed:
        if section.kind is DocstringSectionKind.parameters:
            for shown in section.value:
                real = item.parameters[shown.name]
                shown.value = real.default
                if shown.name not in typed:
                    shown.annotation = real.annotation


class Docstrings(Extension):
    """Adapts every docstring of the package."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Change docstrings in place, after the whole package was read."""
        self._visit(pkg)

    def _visit(self, item: Object) -> None:
        if item.docstring is not None:
            item.docstring.value = _as_markdown(item.docstring.value)
            if isinstance(item, Class | Function):
                _correct_parameters(item)
        for member in item.members.values():
            if isinstance(member, Object) and not member.is_alias:
                self._visit(member)
