"""The pages of docs/ say what is so: pictures, messages, sizes, code and links."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_calls import Layer
from scripts import load_script

import cake
from cake.testing import synthetic

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    load_script(DOCS / "pictures.py").draw(folder)
    return folder


@pytest.mark.parametrize("name", ["layout-rows", "layout-scales", "performance", "blackwell"])
def test_picture_is_current(drawn: Path, name: str) -> None:
    """Compares the words and figures in it: shapes differ from one matplotlib to another."""
    kept, new = (
        re.findall(r"<text[^>]*>(.*?)</text>", (folder / f"{name}.svg").read_text(), re.S)
        for folder in (DOCS / "images", drawn)
    )
    assert len(new) > 15
    assert kept == new, "run python docs/pictures.py"


def source_messages() -> list[str]:
    """Return every string of the Python sources and, of each C++ source, its strings in order.

    What is inserted at run time is a NUL.
    """
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for file in (ROOT / "cpp").rglob("*"):
        if file.suffix in (".h", ".cpp") and "tests" not in file.parts:
            runs = re.findall(r'(?:"(?:\\.|[^"\\\n])*"\s*)+', file.read_text())
            found.append("\0".join("".join(re.findall(r'"(.*?)"', run)) for run in runs))
    return found


def quotes() -> list[str]:
    text = (DOCS / "troubleshooting.md").read_text()
    return [line[2:].replace(r"\*", "*") for line in text.splitlines() if line.startswith("> ")]


def is_message(quote: str, messages: list[str]) -> bool:
    pieces = [re.escape(piece) for piece in quote.split("...") if piece]
    pattern = re.compile(".{0,200}?".join(pieces), re.S)
    return max(map(len, pieces)) > 10 and any(pattern.search(message) for message in messages)


def test_quoted_messages_are_those_of_the_sources() -> None:
    messages = source_messages()
    assert len(quotes()) > 30
    assert [quote for quote in quotes() if not is_message(quote, messages)] == []
    assert not is_message("w13_order: expected 'gate_first', got ...", messages)


def test_workspace_sizes() -> None:
    text = (DOCS / "workspace.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \|$", text, re.M)
    assert len(rows) > 5
    for tokens, size in rows:
        assert torch.ops.cake.workspace_size(int(tokens)) == int(size.replace(",", ""))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_compiles(page: Path) -> None:
    for block in blocks(page):
        compile(block, str(page), "exec")


@pytest.mark.parametrize(("page", "count"), [("quickstart", 1), ("layout", 1), ("workspace", 2)])
def test_code_runs_on_the_cpu(
    page: str, count: int, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_layer(seed: int, **_: Any) -> tuple[Any, list[torch.Tensor]]:
        return layer.weights, list(layer.scales)

    monkeypatch.setattr(synthetic, "make_layer", make_layer)
    monkeypatch.setattr(cake, "is_supported", lambda device: (device == "cpu", ""))
    found: dict[str, Any] = {}
    for block in blocks(DOCS / f"{page}.md")[:count]:
        assert len(block.splitlines()) <= 20 or page != "quickstart"
        exec(block, found)
    if page == "quickstart":
        assert found["out"].shape == (4, 3584)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_out_of_the_site(name: str) -> None:
    """Those within the site are checked by ci/docs.sh."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_math_becomes_mathml() -> None:
    pytest.importorskip("latex2mathml", reason="needs .[docs]: ci/docs.sh installs it")
    html = load_script(DOCS / "hooks.py").on_page_markdown(
        "a\n\n```math\n\\frac{a}{2}\n```\n\nb `x`"
    )
    assert "<mfrac>" in html and "```" not in html and html.endswith("b `x`")


def test_docstrings_are_shown_with_the_defaults_of_the_signature(tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe", reason="needs .[docs]: ci/docs.sh installs it")
    (tmp_path / "sample.py").write_text(
        "def f(a: int, b: bool = True, c: str = 'x'):\n"
        '    """See :func:`g`: p*q*r, ``s*t*u``.\n\n    Parameters\n    ----------\n'
        "    a, b\n        Both::\n\n        ==  ==\n        h   i\n        ==  ==\n        1   2\n"
        '        ==  ==\n    c : {"x", "y"}\n        One.\n    """\n'
    )
    module = griffe.load(
        "sample",
        search_paths=[tmp_path],
        docstring_parser="numpy",
        extensions=griffe.load_extensions(load_script(DOCS / "docstrings.py").Docstrings()),
    )
    text, parameters = module["f"].docstring.parsed
    assert text.value == r"See `g`: p\*q\*r, ``s*t*u``."
    shown = [(p.name, str(p.annotation), p.default) for p in parameters.value]
    assert shown[:2] == [("a", "int", None), ("b", "bool", "True")]
    assert shown[2][2] == "'x'"
    assert parameters.value[0].description == "Both:\n\n```text\nh   i\n1   2\n```"
