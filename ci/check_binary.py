"""Checks what a wheel of cake ships: one library with all it needs, and its bill of materials.

    python ci/check_binary.py [--cpu-only] WHEEL

Prints one line for each check; exit status 1 if any failed. Needs pyelftools, and for the cubins
cuobjdump and nvdisasm (beside nvcc, on PATH, or from the packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm). What is checked of the Blackwell kernels' machine code: check_sass.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "build_support"), str(ROOT / "ci")]

from cake_build import nvcc  # noqa: E402
from cake_sbom import PARTS  # noqa: E402
from check_sass import MATRIX_INSTRUCTION, check_blackwell  # noqa: E402

# What a system with glibc 2.34 (the wheel's platform tag) brings: its libstdc++ is GCC 11's.
CEILINGS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}
# libtorch is mapped by `import torch`; the rest is on every such system.
NEEDED = re.compile(
    r"libtorch\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(m|c)\.so\.6"
    r"|libdl\.so\.2|libpthread\.so\.0|librt\.so\.1|ld-linux-[\w-]+\.so\.\d"
)
ARCHS = {"sm_90a", "sm_100a", "sm_103a"}
# Library about 1.6 MB (a third of it the static CUDA runtime), 0.7 MB zipped. A jump past the
# budget means an uncompressed fat binary, debug information or a stray file.
MAX_WHEEL_BYTES = 2_000_000

# What the library contains of others, as build_support/cake_sbom.py names it.
BOM_PARTS = {part.name for part in PARTS}
CUDA_PARTS = {part.name for part in PARTS if part.folder != "torch_include"}

# A name inside namespace at, c10, torch or caffe2: the C++ ABI that changes between torch versions.
TORCH_CXX = re.compile(r"_Z.*N[KVRO]*(2at|3c10|5torch|6caffe2)")
# Absent from a CPU-only torch; may be looked up at run time or referenced weakly.
TORCH_CUDA = re.compile(r"aoti_torch_(?!device_type_).*cuda")
PYTHON = re.compile(r"_?Py[A-Z_]")
CUDA = re.compile(r"_?_?cu(da)?[A-Z]")  # driver and runtime; the runtime is linked statically
EXPORTED = re.compile(r"cake_")
# Vague linkage: templates and type names of libstdc++ that any C++ library shares.
EXPORTED_WEAK = re.compile(r"_Z(T[IS])?(N?K?S[tabdios]|NKSt|Z+N?K?St|NSt)|_ZG[VR]N?St")


@dataclass
class Symbol:
    """One dynamic symbol, its binding without the STB_ prefix."""

    name: str
    bind: str
    defined: bool


@dataclass
class Library:
    """What the checks read of an ELF library."""

    symbols: list[Symbol]
    needed: list[str]
    rpath: list[str]
    versions: set[str]


@dataclass
class Report:
    """The lines of the table, and whether one of them failed."""

    failed: bool = False
    lines: list[str] = field(default_factory=list)

    def add(self, what: str, found: object, problems: Iterable[str] = ()) -> None:
        """One line of the table, failed if there are problems."""
        wrong = list(problems)
        self.failed |= bool(wrong)
        self.lines.append(f"{'FAIL' if wrong else 'ok':5} {what:18} {found}")
        self.lines += [f"      - {p}" for p in wrong]


def read_library(path: Path) -> Library:
    """Dynamic symbols, dependencies and needed versions of a library."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as stream:
        elf: Any = ELFFile(stream)
        symbols = [
            Symbol(s.name, s["st_info"]["bind"][4:], s["st_shndx"] != "SHN_UNDEF")
            for s in elf.get_section_by_name(".dynsym").iter_symbols()
            if s.name
        ]
        tags = list(elf.get_section_by_name(".dynamic").iter_tags())
        requirements = elf.get_section_by_name(".gnu.version_r")
        versions = {
            version.name
            for _, wanted in (requirements.iter_versions() if requirements else [])
            for version in wanted
        }
    needed = [t.needed for t in tags if t.entry.d_tag == "DT_NEEDED"]
    rpath = [str(t.entry.d_tag) for t in tags if t.entry.d_tag in {"DT_RPATH", "DT_RUNPATH"}]
    return Library(symbols, needed, rpath, versions)


def newest(versions: Iterable[str], family: str) -> tuple[int, ...]:
    """The highest version of a family: GLIBC_2.2.5 and GLIBC_2.34 give (2, 34)."""
    pattern = re.compile(rf"{family}_(\d+(?:\.\d+)*)")
    found = [m[1] for v in versions if (m := pattern.fullmatch(v))]
    return max((tuple(int(n) for n in f.split(".")) for f in found), default=(0,))


def foreign_symbols(symbols: Iterable[Symbol]) -> list[str]:
    """Undefined symbols that tie the library to one torch, one Python or one CUDA runtime."""
    problems = []
    for symbol in symbols:
        if symbol.defined:
            continue
        if TORCH_CXX.match(symbol.name):
            problems.append(f"{symbol.name}: not of torch's stable ABI")
        elif TORCH_CUDA.match(symbol.name) and symbol.bind != "WEAK":
            problems.append(f"{symbol.name}: missing from a CPU-only torch; look it up by dlsym")
        elif PYTHON.match(symbol.name):
            problems.append(f"{symbol.name}: Python's C API, in a wheel for every Python")
        elif CUDA.match(symbol.name):
            problems.append(f"{symbol.name}: link CUDA::cudart_static, and no libcuda")
    return problems


def foreign_exports(symbols: Iterable[Symbol]) -> list[str]:
    """Exported symbols other than cake's C functions."""
    return [
        f"{s.name}: hide it, or name it cake_* in extern C"
        for s in symbols
        if s.defined
        and not EXPORTED.match(s.name)
        and not (s.bind != "GLOBAL" and EXPORTED_WEAK.match(s.name))
    ]


def parse_kernels(listing: str) -> dict[str, set[str]]:
    """Kernel -> the architectures that have it, from `cuobjdump --dump-elf-symbols`."""
    kernels: dict[str, set[str]] = {}
    arch = ""
    for line in listing.splitlines():
        words = line.split()
        if line.startswith("arch = "):
            arch = words[2]
        elif words and words[0] == "FUNC" and "ENTRY" in words:
            kernels.setdefault(words[-1], set()).add(arch)
    return kernels


def missing_cubins(kernels: dict[str, set[str]]) -> list[str]:
    """Kernels without code for an architecture; a name with sm90 or sm100 asks only for its own."""
    problems = [] if kernels else ["no kernel at all"]
    for name, archs in sorted(kernels.items()):
        wanted = ARCHS
        if "sm90" in name:
            wanted = {"sm_90a"}
        elif "sm100" in name or "sm103" in name:
            wanted = ARCHS - {"sm_90a"}
        problems += [f"{name}: no {arch}" for arch in sorted(wanted - archs)]
    return problems


def find_tool(name: str) -> Path | None:
    """A program of CUDA beside nvcc, on PATH, or in this interpreter's packages."""
    compiler, on_path = nvcc(), shutil.which(name)
    candidates = [compiler.with_name(name)] if compiler else []
    candidates += [Path(on_path)] if on_path else []
    packages = Path(sysconfig.get_path("purelib"), "nvidia")
    candidates += sorted(packages.glob(f"cu1*/bin/{name}"))
    return next((c for c in candidates if c.is_file()), None)


def check_cubins(library: Path, report: Report) -> None:
    """Every kernel has every architecture, there is no PTX, and Blackwell's code is as meant."""
    names = ("cuobjdump", "nvdisasm")
    tool, disassembler = (find_tool(name) for name in names)
    if tool is None or disassembler is None:
        missing = [f"pip install nvidia-cuda-{n}" for n in names if find_tool(n) is None]
        report.add("cubins", "not read", missing)
        return
    environment = {**os.environ, "PATH": f"{disassembler.parent}:{os.environ.get('PATH', '')}"}

    def dump(*options: str) -> str:
        command = [str(tool), *options, str(library)]
        return subprocess.run(command, capture_output=True, text=True, env=environment).stdout

    kernels = parse_kernels(dump("--dump-elf-symbols"))
    archs = sorted(set().union(*kernels.values()), key=lambda a: (len(a), a))
    report.add("cubins", f"{len(kernels)} kernels; {' '.join(archs)}", missing_cubins(kernels))
    ptx = re.findall(r"\S+\.ptx\b", dump("--list-ptx"))
    report.add("PTX", len(ptx), [f"{p}: build -real architectures only" for p in ptx])
    for arch in MATRIX_INSTRUCTION:
        listings = [
            dump(option, "--gpu-architecture", arch)
            for option in ("--dump-sass", "--dump-resource-usage", "--dump-elf")
        ]
        found, problems = check_blackwell(arch, kernels, *listings)
        report.add(f"code of {arch}", f"{found} Blackwell kernels", problems)


def check_library(path: Path, report: Report) -> None:
    """Symbols, dependencies and versions of the one library."""
    library = read_library(path)
    exported = [s.name for s in library.symbols if s.defined]
    undefined = len(library.symbols) - len(exported)
    report.add("undefined symbols", undefined, foreign_symbols(library.symbols))
    report.add("exported symbols", len(exported), foreign_exports(library.symbols))
    foreign = [f"{n}: not on the list" for n in library.needed if not NEEDED.fullmatch(n)]
    absent = [] if "libtorch.so" in library.needed else ["libtorch.so is missing: torch not found"]
    report.add("DT_NEEDED", " ".join(library.needed), foreign + absent)
    report.add("rpath", len(library.rpath), [f"{r}: remove it" for r in library.rpath])
    for family, ceiling in CEILINGS.items():
        found = newest(library.versions, family)
        over = [f"above {'.'.join(map(str, ceiling))}"] if found > ceiling else []
        report.add(family, ".".join(map(str, found)), over)
    leaked = str(ROOT).encode() in path.read_bytes()
    report.add(
        "build paths",
        int(leaked),
        ["map it (-ffile-prefix-map); -lineinfo keeps it"] if leaked else [],
    )


def sbom_problems(text: bytes, version: str, library: bytes, cpu_only: bool) -> list[str]:
    """What is wrong with the bill of materials beside a library of that version."""
    try:
        bom: Any = json.loads(text)
        subject, parts = bom["metadata"]["component"], bom["components"]
        facts = {p["name"]: p["value"] for p in subject["properties"]}
        names = {part["name"] for part in parts if part["version"] and part["licenses"]}
        commit, found = facts["cake:commit"], subject["version"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"not CycloneDX as cake_sbom.py writes it: {error!r}"]
    missing = BOM_PARTS - (CUDA_PARTS if cpu_only else set()) - names
    problems = [f"{name}: missing, or without version or license" for name in sorted(missing)]
    if bom.get("bomFormat") != "CycloneDX":
        problems.append("bomFormat: expected CycloneDX")
    if found != version:
        problems.append(f"version {found}: expected the wheel's, {version}")
    if f'"commit": "{commit}"'.encode() not in library:
        problems.append(f"commit {commit}: not the library's; build afresh")
    if b'"/' in text:
        problems.append("path of the build machine")
    return problems


def check_wheel(wheel: Path, cpu_only: bool) -> Report:
    """Runs every check on a wheel."""
    report = Report()
    size = wheel.stat().st_size
    over = [f"budget {MAX_WHEEL_BYTES:,} bytes"] if size > MAX_WHEEL_BYTES else []
    report.add("size", f"{size:,} bytes", over)
    tag_ok = re.search(r"-py3-none-(many)?linux_\w+\.whl$", wheel.name)
    report.add("tag", wheel.name, [] if tag_ok else ["expected py3-none-<platform>"])
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        found = sorted(
            p.relative_to(folder) for p in Path(folder).rglob("*") if ".so" in p.suffixes
        )
        one = len(found) == 1 and found[0].parent == Path("cake")
        report.add(
            "libraries",
            " ".join(map(str, found)) or "none",
            [] if one else ["expected exactly one .so, in cake/"],
        )
        boms = sorted(Path(folder).glob("*.dist-info/sboms/*.cdx.json"))
        report.add(
            "sbom",
            " ".join(b.name for b in boms) or "none",
            [] if boms else ["expected one in dist-info/sboms/, from cmake/sbom.cmake"],
        )
        for library in found if one else []:
            code, version = Path(folder, library).read_bytes(), wheel.name.split("-")[1]
            for bom in boms:
                problems = sbom_problems(bom.read_bytes(), version, code, cpu_only)
                report.add(bom.name, f"version {version}", problems)
            check_library(Path(folder, library), report)
            if not cpu_only:
                check_cubins(Path(folder, library), report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks a built wheel of cake.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cpu-only", action="store_true", help="built with -DCAKE_CUDA=OFF")
    arguments = parser.parse_args()
    report = check_wheel(arguments.wheel, arguments.cpu_only)
    print("\n".join(report.lines))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
