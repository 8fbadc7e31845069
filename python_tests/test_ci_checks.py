"""The checks of ci/ find what they look for: planted violations, and listings with known faults."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest
from scripts import load_script

CI = Path(__file__).resolve().parents[1] / "ci"


layers = load_script(CI / "check_layers.py")
binary = load_script(CI / "check_binary.py")
sass = sys.modules["check_sass"]


def plant(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return layers.violations(root)


K = "cpp/kernels"

# What is planted -> the beginning of the one line that must be printed.
VIOLATIONS: dict[str, tuple[dict[str, str], str]] = {
    "torch": ({f"{K}/a.cpp": "#include <torch/library.h>\n"}, f"{K}/a.cpp:1: torch: "),
    "ATen": ({f"{K}/a.cpp": '\n#include "ATen/ATen.h"\n'}, f"{K}/a.cpp:2: torch: "),
    "c10": ({"cpp/a.h": "#  include <c10/util/Half.h>\n"}, "cpp/a.h:1: torch: "),
    "ptx": ({f"{K}/ptx/a.cuh": '#include "common/nvfp4.h"\n'}, f"{K}/ptx/a.cuh:1: ptx: "),
    "ptx, public": ({f"{K}/ptx/a.cuh": "#include <cake/status.h>\n"}, f"{K}/ptx/a.cuh:1: ptx: "),
    "ptx, sibling": (
        {f"{K}/ptx/a.cuh": '#include "b.cuh"\n', f"{K}/ptx/b.cuh": ""},
        f"{K}/ptx/a.cuh:1: ptx: ",
    ),
    "stage": ({f"{K}/fc1/a.cu": '#include "routing/config.h"\n'}, f"{K}/fc1/a.cu:1: stage: "),
    "stage, beside": (
        {f"{K}/fc1/a.cu": '\n#include "../fc2/config.h"\n'},
        f"{K}/fc1/a.cu:2: stage: ",
    ),
    "stage, long": (
        {f"{K}/fc1/a.cu": '#include "kernels/fc2/b.h"\n', f"{K}/fc2/b.h": ""},
        f"{K}/fc1/a.cu:1: stage: ",
    ),
    "stage, cpu": ({f"{K}/fc1/a.cu": '#include "cpu/b.h"\n'}, f"{K}/fc1/a.cu:1: stage: "),
    "cuh": ({f"{K}/a.cpp": '#include "ptx/tma.cuh"\n'}, f"{K}/a.cpp:1: cuh: "),
    "asm, model": (
        {"cpp/tests/model/include/ptx/a.cuh": 'void f() { asm("nop;"); }\n'},
        "cpp/tests/model/include/ptx/a.cuh:1: asm: ",
    ),
    "asm": ({f"{K}/a.h": '// asm("")\nvoid f() { asm volatile("nop;"); }\n'}, f"{K}/a.h:2: asm: "),
    "asm, bare": ({f"{K}/a.h": '/*\n*/ void f() { asm("nop;"); }\n'}, f"{K}/a.h:2: asm: "),
    "length": ({"src/cake/a.py": "\n" * 401}, "src/cake/a.py:401: length: "),
    "optional": (
        {"src/cake/__init__.py": "import torch\nimport rich.table\n"},
        "src/cake/__init__.py:2: optional: ",
    ),
    "optional, in two steps": (
        {
            "src/cake/__init__.py": "from cake import api\n",
            "src/cake/api.py": "from .layout import row_map\n",
            "src/cake/layout.py": "try:\n    from numpy import array\nexcept ImportError:\n    0\n",
        },
        "src/cake/layout.py:2: optional: ",
    ),
    "api": (
        {"src/cake/api.py": "def f():\n    from .integrations import vllm\n"},
        "src/cake/api.py:2: api: ",
    ),
}

ALLOWED: dict[str, dict[str, str]] = {
    "torch ops": {"cpp/torch_ops.cpp": "#include <torch/csrc/stable/library.h>\n"},
    "foreign torch-like": {f"{K}/a.cpp": "#include <torchlight/a.h>\n"},
    "ptx system": {f"{K}/ptx/tma.cuh": 'void f() { asm volatile("nop;"); }\n#include <cstdint>'},
    "model": {"cpp/tests/model/include/ptx/a.cuh": '#include "common/a.h"\n'},
    "own stage": {
        f"{K}/fc1/launch.cu": '#include "config.h"\n#include "fc1/kernel.cuh"\n',
        f"{K}/fc1/config.h": '#include "../common/nvfp4.h"\n',
    },
    "orchestrator": {
        f"{K}/cpu/fused_moe_cpu.cpp": '#include "cpu/quantize.h"\n#include "finalize.h"\n',
        f"{K}/fused_moe.cpp": '#include "quantize/launch.h"\n#include "cpu/stages.h"\n',
    },
    "asm in words": {f"{K}/a.cpp": '// asm(\nconst char* s = "asm (";\nint plasma(int);\n'},
    "optional inside": {
        "src/cake/__init__.py": "def f():\n    import rich\ndef g(n):\n    import numpy\n",
    },
    "optional elsewhere": {"src/cake/__init__.py": "", "src/cake/demo.py": "import rich\n"},
    "optional for types": {
        "src/cake/__init__.py": "import typing\nif typing.TYPE_CHECKING:\n    import rich\n",
    },
    "length": {"src/cake/long.py": "\n" * 400},
    "not ours": {"build/a.py": "\n" * 500, ".venv/a.py": "\n" * 500},
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_found(tmp_path: Path, name: str) -> None:
    files, expected = VIOLATIONS[name]
    found = plant(tmp_path, files)
    assert [line[: len(expected)] for line in found] == [expected], found


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_is_not_flagged(tmp_path: Path, name: str) -> None:
    assert plant(tmp_path, ALLOWED[name]) == []


def test_this_repository_keeps_its_layers() -> None:
    assert layers.violations(CI.parent) == []


def symbol(name: str, bind: str = "GLOBAL", defined: bool = False) -> object:
    return binary.Symbol(name, bind, defined)


@pytest.mark.parametrize(
    "name",
    [
        "_ZN3c105ErrorC1Ev",
        "_ZNK2at6Tensor3dimEv",
        "_ZTIN3c105ErrorE",
        "_Z3addRKN2at6TensorE",
        "_ZN5torch3jit4loadEv",
        "aoti_torch_get_current_cuda_stream",
        "PyLong_AsLong",
        "_Py_Dealloc",
        "cudaLaunchKernel",
        "cuTensorMapEncodeTiled",
        "__cudaRegisterFunction",
    ],
)
def test_foreign_symbol_is_found(name: str) -> None:
    assert len(binary.foreign_symbols([symbol(name)])) == 1
    assert binary.foreign_symbols([symbol(name, defined=True)]) == []


def test_symbols_that_may_be_undefined() -> None:
    names = [
        "aoti_torch_get_dtype",
        "aoti_torch_device_type_cuda",
        "torch_library_impl",
        "_ZNSt13runtime_errorD1Ev",
        "memcpy",
    ]
    names += ["_ZNSt6vectorIiSaIiEE2atEm", "cuberoot"]
    weak = [symbol("aoti_torch_get_current_cuda_stream", "WEAK"), symbol("__gmon_start__", "WEAK")]
    assert binary.foreign_symbols([*map(symbol, names), *weak]) == []


def test_exports() -> None:
    allowed = [
        symbol("cake_build_info", defined=True),
        symbol("_ZTISt11_Mutex_baseILN9__gnu_cxx12_Lock_policyE2EE", "WEAK", True),
        symbol("_ZZNSt8__detail18__to_chars_10_implIjEEvPcjT_E8__digits", "LOOS", True),
        symbol("memcpy"),
    ]
    assert binary.foreign_exports(allowed) == []
    hidden = [
        symbol("_ZN4cake9fused_moeEv", defined=True),
        symbol("_ZN4cake6StatusD1Ev", "WEAK", True),
        symbol("cudaMalloc", defined=True),
    ]
    assert len(binary.foreign_exports(hidden)) == 3


def test_newest_version() -> None:
    versions = {"GLIBC_2.2.5", "GLIBC_2.34", "GLIBC_2.4", "GLIBCXX_3.4.26", "GLIBC_PRIVATE"}
    assert binary.newest(versions, "GLIBC") == (2, 34)
    assert binary.newest(versions, "GLIBCXX") == (3, 4, 26)
    assert binary.newest(versions, "CXXABI") == (0,)
    assert binary.CEILINGS["GLIBC"] < (2, 35)


def test_needed() -> None:
    allowed = ["libtorch.so", "libstdc++.so.6", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"]
    assert all(binary.NEEDED.fullmatch(n) for n in [*allowed, "ld-linux-aarch64.so.1"])
    foreign = ["libtorch_cuda.so", "libcuda.so.1", "libcudart.so.13", "libc10.so", "libpython3.so"]
    assert not any(binary.NEEDED.fullmatch(n) for n in foreign)


def listing(archs: list[str], kernel: str) -> str:
    """What cuobjdump prints of these architectures."""
    one = f"""
Fatbin elf code:
================
arch = {{}}
code version = [1,8]
compressed

symbols:
OBJECT        WEAK    DEFAULT    -                                 U  .nv.reservedSmem.offset0
FUNC          WEAK    DEFAULT    -                                    $__internal_0_$__div_u64
FUNC          GLOBAL  DEFAULT    ENTRY                                {kernel}
"""
    return "".join(one.format(arch) for arch in archs)


def test_cubins() -> None:
    full = binary.parse_kernels(listing(["sm_90a", "sm_100a", "sm_103a"], "_Z4scale"))
    assert full == {"_Z4scale": {"sm_90a", "sm_100a", "sm_103a"}}
    assert binary.missing_cubins(full) == []
    part = binary.parse_kernels(listing(["sm_90a", "sm_100a"], "_Z4scale"))
    assert binary.missing_cubins(part) == ["_Z4scale: no sm_103a"]
    assert binary.missing_cubins({}) == ["no kernel at all"]


@pytest.mark.parametrize(
    ("kernel", "archs"),
    [("_Z8fc1_sm90", {"sm_90a"}), ("_Z9fc1_sm100", {"sm_100a", "sm_103a"})],
)
def test_cubins_of_one_generation(kernel: str, archs: set[str]) -> None:
    assert binary.missing_cubins({kernel: archs}) == []
    assert len(binary.missing_cubins({kernel: set()})) == len(archs)


def test_wheel_without_library(tmp_path: Path) -> None:
    wheel = tmp_path / "cake_moe-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("cake/__init__.py", "")
    report = binary.check_wheel(wheel, cpu_only=True)
    failed = [line.split()[1] for line in report.lines if line.startswith("FAIL")]
    assert failed == ["tag", "libraries", "sbom"]


def test_workflows_call_scripts_that_exist() -> None:
    called = {
        name
        for workflow in (CI.parent / ".github/workflows").glob("*.yml")
        for name in re.findall(r"bash (ci/\S+)|uses: \./(\S+)", workflow.read_text("utf-8"))
    }
    names = {script or workflow for script, workflow in called}
    assert {"ci/test.sh", "ci/test_wheel.sh", ".github/workflows/ci.yml"} <= names
    assert all((CI.parent / name).is_file() for name in names)


FC1 = "_ZN4cake3fc114cake_fc1_sm100ILi8EEEvv"
FC2 = "_ZN4cake3fc214cake_fc2_sm100ILi8EEEvv"

# As cuobjdump lists it: address, guard, opcode, operands, encoding.
PRODUCT = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                  /* 0x0000df00ff017b82 */
                                                                            /* 0x000fe20000000800 */
        /*0010*/                   ACQBULK ;                                /* 0x000000000000782e */
        /*0020*/                   PREEXIT ;
        /*0030*/                   LDG.E.STRONG.GPU R6, desc[UR6][R4.64] ;
        /*0040*/               @P0 BRA 0x80 ;
        /*0050*/                   UTMALDG.2D [UR12], [UR22], desc[UR24] ;
        /*0060*/                   UBLKCP.S.G [UR6], [UR4], UR9, desc[UR24] ;
        /*0070*/                   UTMALDG.2D.GATHER4 [UR8], [UR4] ;
        /*0080*/                   UTCCP.T.S.4 [UR5], gdesc[UR8] ;
        /*0090*/                   UTCOMMA.{kind} gdesc[UR4], gdesc[UR6], tmem[UR8], idesc[UR10] ;
        /*00a0*/                   UTCBAR [UR4], URZ ;
        /*00b0*/                   LDTM.16dp256bit.x2 R8, tmem[UR4] ;
        /*00c0*/                   EXIT ;
"""
# FC2's: weights in one branch, what depends on FC1 after the wait in another.
TWO_WARPS = PRODUCT.replace("ACQBULK", "NOP").replace(
    "UTMALDG.2D.GATHER4 [UR8], [UR4] ;",
    """EXIT ;
        /*0074*/                   ACQBULK ;
        /*0078*/                   UTMALDG.2D [UR8], [UR4] ;""",
)
TWO_WARPS = TWO_WARPS.replace("@P0 BRA 0x80", "@P0 BRA 0x74")


def sass_of(name: str, code: str, arch: str = "sm_100a") -> str:
    kind = sass.MATRIX_INSTRUCTION[arch].removeprefix("UTCOMMA.")
    return f"\tcode for {arch}\n\t\tFunction : {name}\n{code.replace('{kind}', kind)}"


def resources_of(name: str, registers: int = 128, threads: int = 0x140) -> tuple[str, str]:
    usage = f" Function {name}:\n  REG:{registers} STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1280\n"
    elf = f""".nv.info.{name}
\t<0x20>
\tAttribute:\tEIATTR_MAX_THREADS
\tFormat:\tEIFMT_SVAL
\tValue:\t{threads:#x} 0x1 0x1
\t<0x21>
\tAttribute:\tEIATTR_MAXREG_COUNT
\tFormat:\tEIFMT_HVAL
\tValue:\t0xa8
.nv.callgraph
"""
    return usage, elf


def blackwell(name: str, code: str, arch: str = "sm_100a", **numbers: int) -> list[str]:
    """What is wrong with one kernel, without the lines of which kernel."""
    kernels = sass.parse_sass(sass_of(name, code, arch))
    resources = sass.parse_resources(*resources_of(name, **numbers))
    assert isinstance(kernels, dict)
    problems = sass.kernel_problems(arch, name, kernels[name], resources[name])
    assert isinstance(problems, list)
    return problems


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_blackwell_kernels_as_they_should_be(arch: str) -> None:
    assert blackwell(FC1, PRODUCT, arch) == []
    assert blackwell(FC2, TWO_WARPS, arch) == []


@pytest.mark.parametrize(
    "opcode",
    ["UTCOMMA", "UTCCP", "LDTM", "UTCBAR", "UBLKCP", "UTMALDG.2D.GATHER4", "ACQBULK", "PREEXIT"],
)
def test_missing_instruction_is_found(opcode: str) -> None:
    problems = blackwell(FC1, PRODUCT.replace(f" {opcode}", " NOP"))
    assert any(p.startswith("no ") and opcode in p for p in problems), problems


def test_matrix_instruction_of_the_other_architecture_is_found() -> None:
    listing = sass_of(FC1, PRODUCT, "sm_103a")
    kernels = sass.parse_sass(listing)
    resources = sass.parse_resources(*resources_of(FC1))
    found = sass.kernel_problems("sm_100a", FC1, kernels[FC1], resources[FC1])
    assert found == ["no block-scaled matrix instruction (UTCOMMA.4X)"]


@pytest.mark.parametrize("opcode", ["LDL.64", "STL"])
def test_local_memory_is_found(opcode: str) -> None:
    code = PRODUCT.replace("LDC R1", f"{opcode} R1")
    assert blackwell(FC1, code) == [f"local memory: {opcode} at 0x0"]


def test_registers_of_an_sm() -> None:
    assert blackwell(FC1, PRODUCT, registers=200) == []  # 10 warps of 25 units of 256
    assert len(blackwell(FC1, PRODUCT, registers=201)) == 1
    assert len(blackwell(FC1, PRODUCT, threads=0)) == 1


@pytest.mark.parametrize(
    "code",
    [
        PRODUCT.replace("LDC R1, c[0x0][0x37c]", "LDG.E R1, desc[UR6][R4.64]"),
        PRODUCT.replace("        ACQBULK", "    @P1 ACQBULK"),
        PRODUCT.replace("LDC R1, c[0x0][0x37c]", "BRA.U UP0, 0x50"),
        PRODUCT.replace("LDC R1, c[0x0][0x37c]", "CALL.REL.NOINC 0x30"),
        PRODUCT.replace("LDC R1, c[0x0][0x37c]", "BRX R2 -0x30"),
    ],
    ids=["read first", "guarded wait", "branch past it", "call past it", "indirect"],
)
def test_read_before_the_wait_is_found(code: str) -> None:
    assert blackwell(FC1, code)


def test_reads_after_the_wait_and_before_it() -> None:
    assert blackwell(FC2, TWO_WARPS.replace("@P0 BRA 0x74", "@P0 BRA 0x78")) == [
        "no tensor copy comes after ACQBULK only"
    ]


def test_every_blackwell_kernel_is_expected_and_there() -> None:
    listing = sass_of(FC1, PRODUCT) + sass_of("_Z9new_sm100v", PRODUCT)
    found, problems = sass.check_blackwell(
        "sm_100a", [FC1, "_Z9new_sm100v", "_Z8old_sm90v"], listing, *resources_of(FC1)
    )
    assert found == 2
    assert [p.split(":")[1].strip() for p in problems] == [
        "no kernel cake_fc2_sm100",
        "_Z9new_sm100v",
    ]
