"""The bill of materials: from the headers, same facts same bytes, and checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_ci_checks import binary

ROOT = Path(__file__).resolve().parents[1]


sbom = sys.modules["cake_sbom"]

HEADERS = {
    "cuda_runtime_api.h": "#define CUDART_VERSION  13010\n",
    "cccl/cuda/std/__cccl/version.h": "#define CCCL_VERSION 3002001\n",
    "nvtx3/nvToolsExt.h": "#if NVTX_VERSION < 3\n#endif\n  #define NVTX_VERSION 3\n",
    "torch/headeronly/version.h": '# define TORCH_VERSION \\\n "2.13.0"\n',
}
VERSIONS = {"cuda-cudart-static": "13.1", "cccl": "3.2.1", "nvtx": "3", "torch": "2.13.0"}


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, str]:
    for name, text in HEADERS.items():
        file = tmp_path / "include" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    include = str(tmp_path / "include")
    return {
        "name": "cake-moe",
        "version": "1.2.3",
        "commit": "0123456789ab",
        "dirty": "false",
        "system": "Linux aarch64",
        "architectures": "sm_90a",
        "cxx_compiler": "GNU 12.2.0",
        "cuda_compiler": "nvcc 13.1.5",
        "cmake": "CMake 4.0",
        "cuda_include": include,
        "nvtx_include": include,
        "torch_include": include,
    }


def write(facts: dict[str, str], output: Path) -> bytes:
    words = [f"{name}={value}" for name, value in facts.items()]
    command = [sys.executable, str(ROOT / "build_support/cake_sbom.py"), str(output), *words]
    subprocess.run(command, check=True)
    return output.read_bytes()


def test_versions_come_from_the_headers(facts: dict[str, str], tmp_path: Path) -> None:
    text = write(facts, tmp_path / "sboms" / "a.json")
    bom = json.loads(text)
    assert {part["name"]: part["version"] for part in bom["components"]} == VERSIONS
    tools = {tool["name"]: tool["version"] for tool in bom["metadata"]["tools"]["components"]}
    assert tools == {"GNU": "12.2.0", "nvcc": "13.1.5", "CMake": "4.0"}
    assert bom["metadata"]["component"]["purl"] == "pkg:pypi/cake-moe@1.2.3"
    assert str(tmp_path).encode() not in text


def test_same_facts_give_the_same_bytes(facts: dict[str, str], tmp_path: Path) -> None:
    other = dict(reversed(facts.items()))
    assert write(facts, tmp_path / "a.json") == write(other, tmp_path / "b.json")


def test_a_header_without_the_version_stops_the_build(facts: dict[str, str]) -> None:
    Path(facts["nvtx_include"], "nvtx3/nvToolsExt.h").write_text("#define NVTX_VERSION_2 2\n")
    with pytest.raises(ValueError, match=r"nvtx: expected a NVTX_VERSION in .*nvToolsExt\.h"):
        sbom.document(facts)


LIBRARY = b'\0"commit": "0123456789ab", \0'


def check(bom: object, cpu_only: bool = False) -> list[str]:
    text = bom if isinstance(bom, bytes) else json.dumps(bom).encode()
    problems = binary.sbom_problems(text, "1.2.3", LIBRARY, cpu_only)
    assert isinstance(problems, list)
    return problems


def test_a_good_one_has_no_problems(facts: dict[str, str]) -> None:
    assert check(sbom.document(facts)) == []
    cpu = {**facts, "cuda_include": "", "nvtx_include": "", "cuda_compiler": ""}
    assert check(sbom.document(cpu), cpu_only=True) == []
    assert len(check(sbom.document(cpu))) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "1.2.4"}, "version 1.2.4: expected the wheel's, 1.2.3"),
        ({"commit": "ffffffffffff"}, "commit ffffffffffff: not the library's"),
        ({"system": "/home/me"}, "path of the build machine"),
    ],
)
def test_what_does_not_belong_to_the_library_is_found(
    facts: dict[str, str], change: dict[str, str], message: str
) -> None:
    assert [p[: len(message)] for p in check(sbom.document({**facts, **change}))] == [message]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"metadata": 1}'])
def test_other_files_are_refused(text: bytes) -> None:
    assert "not CycloneDX" in check(text)[0]
