"""Checks the layers of docs/design.md, and that no file grows past 400 lines.

    python ci/check_layers.py [ROOT]

Prints `file:line: rule: what to do` for each violation; exit status 1 if there is any.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 400
CPP = {".h", ".cpp", ".cu", ".cuh"}
ASSEMBLY = ("cpp", "kernels", "ptx")  # where inline assembly may be
STAGES = {"cpu", "quantize", "selftest", "routing", "fc1", "fc2", "finalize", "stream"}
OPTIONAL = {
    *("rich", "safetensors", "numpy", "matplotlib"),
    *("flashinfer", "humming", "sglang", "triton", "vllm"),
}
SKIPPED_FOLDERS = {"build", "dist", "__pycache__"}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?P<quote>["<])(?P<path>[^">]+)[">]', re.M)
TORCH = re.compile(r"^(torch|ATen|c10)/")
ASM = re.compile(r"\b(?:asm|__asm|__asm__)\s*(?:(?:volatile|__volatile__|goto)\s*)*\(")
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            d for d in subfolders if not d.startswith(".") and d not in SKIPPED_FOLDERS
        )
        yield from (Path(folder, n) for n in sorted(names) if Path(n).suffix in CPP | {".py"})


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _code_only(text: str) -> str:
    """The text with comments and strings blanked, line breaks kept."""
    return COMMENT_OR_STRING.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def _ours(root: Path, file: Path, quote: str, include: str) -> Path | None:
    """Where an include of ours lies, relative to the root; None for a foreign one."""
    bases = [file.parent, *(root / d for d in ("cpp", "cpp/include", "cpp/kernels", "."))]
    for base in bases if quote == '"' else bases[1:]:
        if (base / include).is_file():
            return Path(os.path.relpath(base / include, root))
    if quote == "<" and not include.startswith("cake/"):
        return None
    beside = file.relative_to(root).parent if include.startswith(".") else Path("cpp/kernels")
    return Path(os.path.normpath(beside / include))


def _stage(path: Path) -> str | None:
    parts = path.parts
    named = parts[:2] == ("cpp", "kernels") and len(parts) > 3 and parts[2] in STAGES
    return parts[2] if named else None


def check_cpp(root: Path, file: Path) -> Iterator[tuple[int, str]]:
    """The rules of includes and of inline assembly in one C++ or CUDA file."""
    here, text = file.relative_to(root), file.read_text(encoding="utf-8")
    in_ptx = here.parts[:3] == ASSEMBLY
    for match in INCLUDE.finditer(text):
        line, include = _line(text, match.start("path")), match["path"]
        if TORCH.match(include) and not here.name.startswith("torch_ops"):
            yield line, f"torch: move what needs <{include}> to cpp/torch_ops*"
        target = _ours(root, file, match["quote"], include)
        if include.endswith(".cuh") and file.suffix not in {".cu", ".cuh"}:
            yield line, f"cuh: include {include} from a .cu file, or make it a plain .h"
        if target and in_ptx:
            yield line, f"ptx: drop {include}; files in ptx/ include nothing of ours"
        stage, other = _stage(here), _stage(target) if target else None
        if stage and other and stage != other:
            yield line, f"stage: {stage}/ must not use {other}/; share through common/"
    if not in_ptx:
        code = _code_only(text)
        for match in ASM.finditer(code):
            yield _line(code, match.start()), "asm: put the instruction in cpp/kernels/ptx/"


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, runs at import time) of each; `from a import b` gives a and a.b."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[int, str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module, at_import
            yield from ((node.lineno, f"{module}.{a.name}", at_import) for a in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from visit(branch, at_import)
        else:
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import and not lazy)

    return visit(tree, True)


def check_python(root: Path) -> Iterator[tuple[Path, int, str]]:
    """What `import cake` reaches imports nothing optional; the API knows no integration."""
    source = root / "src"
    waiting, seen = ["cake"], set[str]()
    while waiting:
        name = waiting.pop()
        folder = source.joinpath(*name.split("."))
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        package = name if folder.is_dir() else name.rpartition(".")[0]
        for line, target, at_import in _imports(ast.parse(file.read_text("utf-8")), package):
            if not at_import:
                continue
            parts = target.split(".")
            if parts[0] in OPTIONAL:
                yield file, line, f"optional: import {parts[0]} inside the function that needs it"
            waiting += [".".join(parts[: i + 1]) for i in range(len(parts)) if parts[0] == "cake"]
    api = source / "cake" / "api.py"
    if api.is_file():
        for line, target, _ in _imports(ast.parse(api.read_text("utf-8")), "cake"):
            if target == "cake.integrations":
                yield api, line, "api: integrations import the API, never the reverse"


def violations(root: Path) -> list[str]:
    """Every violation under the root, as printable lines."""
    found: list[tuple[Path, int, str]] = []
    for file in _source_files(root):
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            found.append((file, lines, f"length: split it; {lines} lines, {MAX_LINES} at most"))
        if file.suffix in CPP and file.is_relative_to(root / "cpp"):
            found += [(file, line, text) for line, text in check_cpp(root, file)]
    found += check_python(root)
    return sorted({f"{file.relative_to(root)}:{line}: {text}" for file, line, text in found})


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    found = violations(root)
    print("\n".join(found) if found else "layers: every file keeps the rules of docs/design.md")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
