"""Writes the wheel's bill of materials (CycloneDX 1.6, JSON) from the facts of the build.

CMake runs it: `python cake_sbom.py OUTPUT name=value...`. Versions of what is compiled in come from
the headers in use. The same facts give the same bytes: there is no time and no random number in it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """Foreign code inside the library, and where its version is written.

    `folder` names the fact with the include folder; `divisors` take the parts of a version that is
    one number, none for one that is text.
    """

    name: str
    folder: str
    header: str
    macro: str
    divisors: tuple[int, ...]
    license: str
    description: str


LLVM = "Apache-2.0 WITH LLVM-exception"
PARTS = (
    Part(
        name="cuda-cudart-static",
        folder="cuda_include",
        header="cuda_runtime_api.h",
        macro="CUDART_VERSION",
        divisors=(1000, 10),
        license="LicenseRef-NVIDIA-CUDA-EULA",
        description="CUDA runtime, linked statically",
    ),
    Part(
        name="cccl",
        folder="cuda_include",
        header="cccl/cuda/std/__cccl/version.h",
        macro="CCCL_VERSION",
        divisors=(1_000_000, 1000, 1),
        license=LLVM,
        description="libcu++, headers",
    ),
    Part(
        name="nvtx",
        folder="nvtx_include",
        header="nvtx3/nvToolsExt.h",
        macro="NVTX_VERSION",
        divisors=(),
        license=LLVM,
        description="NVTX, headers",
    ),
    Part(
        name="torch",
        folder="torch_include",
        header="torch/headeronly/version.h",
        macro="TORCH_VERSION",
        divisors=(),
        license="BSD-3-Clause",
        description="stable ABI, headers; libtorch is the user's",
    ),
)


def version_of(part: Part, include: Path) -> str:
    """The version that the part's header defines.

    Raises
    ------
    ValueError
        If the header does not define it; also a FileNotFoundError if there is none.
    """
    text = (include / part.header).read_text(encoding="utf-8")
    found = re.search(rf'^[ \t]*#[ \t]*define[ \t]+{part.macro}[ \t\\\n]+"?([\w.+]+)', text, re.M)
    if not found:
        raise ValueError(f"{part.name}: expected a {part.macro} in {include / part.header}")
    if not part.divisors:
        return found[1]
    rest, numbers = int(found[1]), []
    for divisor in part.divisors:
        number, rest = divmod(rest, divisor)
        numbers.append(str(number))
    return ".".join(numbers)


def document(facts: Mapping[str, str]) -> dict[str, Any]:
    """The bill of materials.

    Parameters
    ----------
    facts : mapping of str to str
        `name`, `version`, `commit`, `dirty`, `system`, `architectures`, `cxx_compiler`,
        `cuda_compiler`, `cmake`, and the folders `cuda_include`, `nvtx_include`, `torch_include`;
        an empty one means that the part is not in the library.
    """
    parts = [
        {
            "type": "library",
            "name": part.name,
            "version": version_of(part, Path(facts[part.folder])),
            "description": part.description,
            "licenses": [{"expression": part.license}],
        }
        for part in PARTS
        if facts[part.folder]
    ]
    tools = [facts["cxx_compiler"], facts["cuda_compiler"], facts["cmake"]]
    properties = ("commit", "dirty", "system", "architectures")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": version}
                    for name, _, version in (tool.partition(" ") for tool in tools if tool)
                ]
            },
            "component": {
                "type": "library",
                "name": facts["name"],
                "version": facts["version"],
                "purl": f"pkg:pypi/{facts['name']}@{facts['version']}",
                "properties": [{"name": f"cake:{key}", "value": facts[key]} for key in properties],
            },
        },
        "components": parts,
    }


def main() -> None:
    output, *words = sys.argv[1:]
    facts = dict(word.split("=", 1) for word in words)
    text = json.dumps(document(facts), indent=2, sort_keys=True) + "\n"
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
