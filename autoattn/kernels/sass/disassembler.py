"""Reads a kernel's machine code; the only module that runs the disassembler of the Triton wheel.

A cubin is an ELF file. Registers and the stack frame stand in its `.nv.info` section, the instructions in its `.text`
section, 16 bytes each. Starting the disassembler takes 0.3 s of processor time, as long as some compiles, so each
distinct encoding is shown to it once: an instruction's name is a function of a few bits of its encoding (`_name_bits`),
and what it said is remembered, by other processes too. A kernel made of known encodings costs a few milliseconds.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache

from autoattn.core.trial import StaticReport
from autoattn.errors import CompileError
from autoattn.kernels.sass import loops, opcode_cache
from autoattn.kernels.sass.loops import INSTRUCTION_BYTES, TENSOR, Instruction

MOVES = 0.02  # of a loop's instructions may move registers to and from memory; more than that is not worth measuring
_EM_CUDA = 190
_REGISTER_COUNT, _FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info

# Opcodes whose modifiers change what they cost; all others are reported by their first word.
DETAILED = (*TENSOR, "MUFU", "LDSM", "STSM", "LDG", "LDGSTS", "LDS", "STS", "LDL", "STL", "STG",
            "WARPGROUP", "SYNCS", "UTMALDG")  # fmt: skip
_WIDTH = re.compile(r"\.(32|64|128)$|\.(U8|S8|U16|S16)(?=\.|$)")
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)[ ;]([^;]*)")
_ALWAYS = 7  # the predicate PT
_UNIFORM_BRANCH = 0x547
_UNKNOWN = "?"  # an encoding that the disassembler did not print

base_names: dict[int, str] = {}  # architecture and low 12 bits of an encoding -> first word
detailed_names: dict[tuple[int, int, int], str] = {}  # ... with the bits that hold modifiers -> name


def read(cubin: bytes, *, digest: str, arch: int, shared_bytes: int, num_warps: int) -> StaticReport:
    """Reads a compiled kernel.

    Args:
        cubin: the ELF file that the compiler wrote, with one kernel in it.
        digest: of the source that it was compiled from.
        arch: compute capability times ten.
        shared_bytes: shared memory per block, as the compiler reports it.
        num_warps: warps per block.

    Raises:
        CompileError: the bytes are no cubin, hold no kernel, or the disassembler refuses them.
    """
    sections = sections_of(cubin)
    text = next((data for name, data in sections.items() if name.startswith(".text.")), None)
    if text is None:
        raise CompileError("a cubin must hold a kernel's code, got none; compile the kernel again")
    code = decode(cubin, text, arch)
    plain, masked = loops.over_keys(code)
    return StaticReport(
        digest=digest,
        arch=arch,
        registers=_attribute(sections, _REGISTER_COUNT),
        spilled_bytes=_attribute(sections, _FRAME_SIZE),
        shared_bytes=shared_bytes,
        num_warps=num_warps,
        code_bytes=len(text),
        loop=dict(sorted(Counter(plain).items())),
        masked_loop=dict(sorted(Counter(masked).items())),
    )


def why_slow(report: StaticReport, cubin: bytes) -> str:
    """What shows in the machine code that a Hopper kernel of warpgroup products will be far slower than it should be.

    Empty when nothing does. ptxas says so too (C7512, spills), but only while it compiles, not when Triton's own cache
    holds the kernel.
    """
    text = next(data for name, data in sections_of(cubin).items() if name.startswith(".text."))
    names = {name.partition(".")[0] for name, _, _ in decode(cubin, text, report.arch)}
    product = "QGMMA" if "QGMMA" in names else "HGMMA"  # of 8 bits, or of 16
    if missing := [name for name in (product, "UTMALDG") if name not in names]:
        return f"it holds no {' and no '.join(missing)} instruction"
    products = sum(count for name, count in report.loop.items() if name.startswith(product))
    # A product of several instructions starts them together, unless each waits for the one before it.
    if 2 < products <= report.loop.get("WARPGROUP.ARRIVE", 0):
        return f"ptxas serialised its {products} warpgroup products a block, for want of registers"
    moves = sum(count for name, count in report.loop.items() if name.startswith(("LDL", "STL")))
    if moves > MOVES * sum(report.loop.values()):
        return f"each block of keys moves registers to and from memory in {moves} instructions"
    return ""


# --- the ELF file -----------------------------------------------------------------------------------------------------


def sections_of(cubin: bytes) -> dict[str, bytes]:
    """Name -> contents of each section that has contents."""
    if len(cubin) < 64 or cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, 18)[0] != _EM_CUDA:
        raise CompileError("a cubin must be a 64-bit CUDA ELF file, got other bytes; compile the kernel again")
    try:
        start = struct.unpack_from("<Q", cubin, 0x28)[0]
        size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
        sections = {}
        for name, kind, _, _, offset, length in headers:
            begin = headers[names][4] + name
            if kind != 8:  # SHT_NOBITS: occupies no bytes of the file
                sections[cubin[begin : cubin.index(b"\0", begin)].decode()] = cubin[offset : offset + length]
        return sections
    except (struct.error, IndexError, ValueError) as error:
        raise CompileError(f"a cubin must be whole, got a damaged one ({error}); compile the kernel again") from error


def _attribute(sections: dict[str, bytes], wanted: int) -> int:
    """The value of a kernel-wide attribute of .nv.info (format 4: format, attribute, size, symbol, value)."""
    info, at, values = sections.get(".nv.info", b""), 0, [0]
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == 4 and attribute == wanted and size == 8:
            values.append(struct.unpack_from("<I", info, at + 8)[0])
        at += 4 + (size if form == 4 else 0)
    return int(max(values))


# --- names of instructions --------------------------------------------------------------------------------------------


def decode(cubin: bytes, text: bytes, arch: int) -> list[Instruction]:
    """The kernel's instructions in address order; asks the disassembler only about encodings it never saw."""
    words = list(struct.iter_unpack("<QQ", text[: len(text) // INSTRUCTION_BYTES * INSTRUCTION_BYTES]))
    names = [_name(arch, low, high) for low, high in words]
    if None in names and _recall():
        names = [_name(arch, low, high) for low, high in words]
    if None in names:
        for at, spelt, rest in disassemble(cubin):
            low, high = words[at // INSTRUCTION_BYTES]
            _learn(arch, low, high, spelt, rest)
        _keep()
        names = [_name(arch, low, high) or _UNKNOWN for low, high in words]
    code: list[Instruction] = []
    for i, ((low, high), name) in enumerate(zip(words, names, strict=True)):
        target, goes_on = flow_of(name or _UNKNOWN, i * INSTRUCTION_BYTES, low, high, arch)
        code.append((name or _UNKNOWN, target, goes_on))
    return code


def _name(arch: int, low: int, high: int) -> str | None:
    opcode = arch << 12 | low & 0xFFF
    base = base_names.get(opcode)
    if base is None or base not in DETAILED:
        return base
    return detailed_names.get((opcode, *_name_bits(base, low, high)))


def _name_bits(base: str, low: int, high: int) -> tuple[int, int]:
    """The bits that hold an instruction's modifiers: 72 to 104, without the predicates that it reads and writes."""
    # The size of an asynchronous product, and of a copy to or from tensor memory, stands where others hold an address.
    shape = low >> 48 & 0x3FFF if base in ("HGMMA", "QGMMA") else 0
    # A product of one warp and a copy by the TMA unit have no predicates: the type of the product's factors and the
    # highest bit of the copy's dimensions, without which one and five are the same, stand there.
    predicates = 0 if base in ("HMMA", "UTMALDG") else 0x3FF << 9
    return shape, high >> 8 & 0x1FFFFFFFF & ~predicates


def _learn(arch: int, low: int, high: int, name: str, rest: str) -> None:
    base = name.partition(".")[0]
    opcode = arch << 12 | low & 0xFFF
    base_names[opcode] = base
    if base in DETAILED:
        detailed_names[(opcode, *_name_bits(base, low, high))] = short_name(base, name, rest)


def _recall() -> bool:
    """Takes what other processes learned; whether there was anything."""
    heard = opcode_cache.recall(disassembler())
    for bits, name in heard.items():
        if len(bits) == 1:
            base_names.setdefault(bits[0], name)
        elif len(bits) == 3:
            detailed_names.setdefault((bits[0], bits[1], bits[2]), name)
    return bool(heard)


def _keep() -> None:
    """Tells other processes what this one knows."""
    known: opcode_cache.Names = {(opcode,): name for opcode, name in base_names.items()}
    known.update(detailed_names.items())
    opcode_cache.keep(disassembler(), known)


def short_name(base: str, name: str, operands: str) -> str:
    """The name with only those modifiers that change the cost."""
    if base in ("LDG", "LDGSTS", "LDS", "STS", "LDL", "STL", "STG"):
        width = _WIDTH.search(name)
        return base + (f".{width[1] or width[2]}" if width else "")
    if base in ("HGMMA", "QGMMA"):  # the left factor comes from registers (RS) or from shared memory (SS)
        return name + (".RS" if re.match(r"\s*R\d+, R\d+", operands) else ".SS")
    return name


def disassemble(cubin: bytes) -> Iterator[tuple[int, str, str]]:
    """Address, name and operands of each instruction, by one run of nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler(), "--print-code", "--no-dataflow", file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
            raise CompileError(f"nvdisasm must read the cubin, got {said}; reinstall triton") from error
    for line in done.stdout.splitlines():
        if match := _LINE.match(line):
            yield int(match[1], 16), match[2], match[3]


@cache
def disassembler() -> str:
    """Path of nvdisasm: the one that Triton finds (TRITON_NVDISASM_PATH, else the one in its wheel)."""
    from triton import knobs

    try:
        return str(knobs.nvidia.nvdisasm.path)
    except RuntimeError as error:
        raise CompileError(f"Triton must bring nvdisasm along, got {error}; set TRITON_NVDISASM_PATH to one") from error


def flow_of(name: str, at: int, low: int, high: int, arch: int) -> tuple[int | None, bool]:
    """Where an instruction may branch to, and whether it may go on to the next one."""
    always = low >> 12 & 0xF == _ALWAYS
    if name in ("EXIT", "RET", "BPT"):
        return None, not always
    if name != "BRA":
        return None, True
    distance = (high & 0x3FFFF) << 30 | low >> 34
    if distance >> 47:
        distance -= 1 << 48
    if arch >= 90:  # eight more bits stand where the destination register of other instructions is
        distance = distance << 8 | low >> 16 & 0xFF
    # A uniform branch (BRA.U) is decided by a uniform predicate, another one also by a second predicate.
    condition = low >> 24 & 0xF if low & 0xFFF == _UNIFORM_BRANCH else high >> 23 & 0xF
    return at + INSTRUCTION_BYTES + 4 * distance, not (always and condition == _ALWAYS)
