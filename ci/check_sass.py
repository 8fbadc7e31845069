"""Checks the machine code of the Blackwell kernels, as cuobjdump lists it.

check_binary.py runs this on a wheel's library; nothing here needs a GPU. What is checked of each
kernel, for sm_100a and sm_103a:

* the instructions that it exists for are there: block-scaled matrix instruction, copies of scales,
  loads of tensor memory, commits, bulk and tensor copies;
* no local memory: no loads or stores of it, no stack;
* its registers and threads fit an SM. Dynamic shared memory is no part of a cubin; static_asserts
  beside the kernels bound it;
* griddepcontrol.wait comes before dependent reads, as far as the order of instructions says:
  no read of global memory can be reached from the entry without passing the wait. A kernel of which
  some warps read what no earlier grid in flight writes must have tensor copies of both kinds. That
  one warp waits for another through a barrier is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

REGISTERS = 65536  # of an SM; a warp has them in units of 256
WAIT = "ACQBULK"  # griddepcontrol.wait

INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\d+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>[^;]*);"
)
FUNCTION = re.compile(r"^\s*Function : (?P<name>\S+)")
TARGET = re.compile(r"0x[0-9a-f]+\s*$")
LOCAL = re.compile(r"(LDL|STL)\b")
GLOBAL_READ = re.compile(r"(LDG|LD|LDGSTS|UTMALDG|UBLKCP\.S\.G|ATOMG?|LDGMC)\b")
INDIRECT = re.compile(r"(BRX|JMX|JMP|BRXU|JMXU)\b")


@dataclass(frozen=True)
class Instruction:
    """One line of a listing."""

    address: int
    opcode: str
    predicated: bool
    target: int | None  # of a branch or call

    def matches(self, pattern: str) -> bool:
        """Whether the opcode, or its beginning up to a dot, is this."""
        return self.opcode == pattern or self.opcode.startswith(f"{pattern}.")


@dataclass(frozen=True)
class Expected:
    """What a kernel must contain."""

    instructions: dict[str, str]  # what it is -> opcode
    early_reads: bool = False  # some reads do not depend on the grid before


COMMON = {
    "copy of scales": "UTCCP",
    "load of tensor memory": "LDTM",
    "commit": "UTCBAR",
    "bulk copy": "UBLKCP",
    "tensor copy": "UTMALDG",
    "griddepcontrol.wait": WAIT,
    "griddepcontrol.launch_dependents": "PREEXIT",
}
# Part of a kernel's mangled name -> what it must contain.
KERNELS = {
    "cake_fc1_sm100": Expected({**COMMON, "gather": "UTMALDG.2D.GATHER4"}),
    "cake_fc2_sm100": Expected(COMMON, early_reads=True),
}
# kind::mxf4nvf4 with a scale for each 16 elements.
MATRIX_INSTRUCTION = {"sm_100a": "UTCOMMA.4X", "sm_103a": "UTCOMMA.BLOCK16"}


def parse_sass(listing: str) -> dict[str, list[Instruction]]:
    """Kernel -> its instructions, from `cuobjdump --dump-sass` of one architecture."""
    kernels: dict[str, list[Instruction]] = {}
    code: list[Instruction] | None = None
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            code = kernels.setdefault(match["name"], [])
        elif code is not None and (match := INSTRUCTION.search(line)):
            jumps = re.match(r"(BRA|CALL)\b", match["opcode"])
            found = TARGET.search(match["rest"]) if jumps else None
            target = int(found[0], 16) if found else None
            code.append(
                Instruction(
                    int(match["address"], 16), match["opcode"], bool(match["guard"]), target
                )
            )
    return kernels


@dataclass(frozen=True)
class Resources:
    """Of one kernel, from its cubin."""

    registers: int
    stack: int
    max_threads: int


def parse_resources(usage: str, elf: str) -> dict[str, Resources]:
    """Kernel -> resources, from `cuobjdump --dump-resource-usage` and `--dump-elf`."""
    threads: dict[str, int] = {}
    name, attribute = "", ""
    for line in elf.splitlines():
        if line.startswith("."):
            name = line.removeprefix(".nv.info.") if line.startswith(".nv.info.") else ""
        elif "Attribute:" in line:
            attribute = line.split()[-1]
        elif name and attribute == "EIATTR_MAX_THREADS" and "Value:" in line:
            x, y, z = (int(v, 16) for v in line.split()[1:4])
            threads[name] = x * y * z
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    return {
        kernel: Resources(int(registers), int(stack), threads.get(kernel, 0))
        for kernel, registers, stack in found
    }


def reads_without_wait(code: list[Instruction]) -> list[Instruction]:
    """Reads of global memory that a path from the entry reaches without the wait.

    Both ways of a guarded instruction are followed; a call goes on after it as well as into it.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}
    reached, waiting = set[int](), [0]
    while waiting:
        i = waiting.pop()
        if i >= len(code) or i in reached:
            continue
        reached.add(i)
        instruction = code[i]
        if instruction.matches(WAIT) and not instruction.predicated:
            continue
        if instruction.target is not None and instruction.target in index:
            waiting.append(index[instruction.target])
        ends = any(instruction.matches(o) for o in ("EXIT", "RET", "KILL"))
        # BRA.U and BRA.DIV have their condition among the operands.
        jumps = instruction.opcode == "BRA" and instruction.target is not None
        if instruction.predicated or not (ends or jumps):
            waiting.append(i + 1)
    return [code[i] for i in sorted(reached) if GLOBAL_READ.match(code[i].opcode)]


def wait_problems(code: list[Instruction], expected: Expected) -> list[str]:
    """Dependent reads that may come before the wait."""
    if any(INDIRECT.match(i.opcode) for i in code):
        return ["an indirect branch: the order of reads and wait cannot be told"]
    early = reads_without_wait(code)
    if not expected.early_reads:
        return [f"{i.opcode} at 0x{i.address:x} may come before {WAIT}" for i in early[:3]]
    tensor_copies = {i.address for i in code if i.matches("UTMALDG")}
    late = tensor_copies - {i.address for i in early}
    return [] if late else [f"no tensor copy comes after {WAIT} only"]


def kernel_problems(
    arch: str, name: str, code: list[Instruction], resources: Resources | None
) -> list[str]:
    """What is wrong with one Blackwell kernel of one architecture."""
    expected = next((e for part, e in KERNELS.items() if part in name), None)
    if expected is None:
        return [f"unknown kernel: add {name} to KERNELS in ci/check_sass.py"]
    wanted = {"block-scaled matrix instruction": MATRIX_INSTRUCTION[arch], **expected.instructions}
    problems = [
        f"no {what} ({opcode})"
        for what, opcode in wanted.items()
        if not any(i.matches(opcode) for i in code)
    ]
    local = [i for i in code if LOCAL.match(i.opcode)]
    problems += [f"local memory: {i.opcode} at 0x{i.address:x}" for i in local[:3]]
    if resources is None or resources.max_threads == 0:
        problems.append("registers and threads are unknown")
    else:
        if resources.stack:
            problems.append(f"stack of {resources.stack} bytes")
        warps = (resources.max_threads + 31) // 32
        registers = warps * ((resources.registers * 32 + 255) // 256 * 256)
        if registers > REGISTERS:
            problems.append(
                f"{resources.registers} registers x {resources.max_threads} threads: more than an "
                "SM has"
            )
    return problems + wait_problems(code, expected)


def check_blackwell(
    arch: str, names: Iterable[str], sass: str, usage: str, elf: str
) -> tuple[int, list[str]]:
    """The number of Blackwell kernels of one architecture, and what is wrong with them.

    `names`: mangled names of the library's kernels; each expected one must be among them.
    """
    kernels, resources = parse_sass(sass), parse_resources(usage, elf)
    ours = sorted(n for n in names if "sm100" in n)
    problems = [f"no kernel {part}" for part in KERNELS if not any(part in n for n in ours)]
    for name in ours:
        found = kernel_problems(arch, name, kernels.get(name, []), resources.get(name))
        problems += [f"{name}: {problem}" for problem in found]
    return len(ours), [f"{arch}: {problem}" for problem in problems]
