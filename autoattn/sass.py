"""What the machine code says of a kernel: the only door to the disassembler inside the Triton wheel.

A cubin is an ELF file. Registers and the stack frame stand in its `.nv.info` section, the instructions in its `.text`
section, 16 bytes each. Starting the disassembler takes 0.3 s of processor time, as long as some compiles, so each
distinct encoding is shown to it once: an instruction's name is a function of a few bits of its encoding (`_name_bits`),
and what it said is remembered, by other processes too. A kernel made of known encodings costs a few milliseconds.

Which loops are reported. A loop is a natural loop of the control-flow graph (a branch back to a block that dominates
it). The loops over keys are the innermost ones that hold a matrix product and an exp2, or a product alone where none
holds both: a kernel without softmax. A pass of such a loop is a path from its head back to its head; where it can
branch (a mask that only some blocks need, a rescale that only some blocks need) the lightest and the heaviest path
through all of that are read. Then:

- loops around a loop of its own that loads from memory are left out when others are not: they are the second chance
  that adds values key by key, where these may be NaN or infinite;
- so are loops that multiply more than others do: the same second chance, where one more product finds such values;
- loops that track a running maximum (FMNMX) are left out when another loop does not: they are the second chance of the
  `first_max` softmax, which runs when a tile overflowed;
- `loop` is the lightest path of the loop with the fewest masking instructions (ISETP, FSEL and their kin);
- `masked_loop` is the heaviest path of the loop with the most, where they are more by half of its exp2; else empty.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache

from autoattn import encodings
from autoattn.errors import CompileError
from autoattn.trial import StaticReport

INSTRUCTION_BYTES = 16
MOVES = 0.02  # of a loop's instructions may move registers to and from memory; more than that is not worth measuring
_EM_CUDA = 190
_REGISTER_COUNT, _FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info

TENSOR = ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "IMMA", "QGMMA", "OMMA", "QMMA")
MASKING = ("ISETP", "FSEL", "FSETP", "SEL", "PLOP3", "P2R", "R2P", "USEL", "UISETP")
# Opcodes whose modifiers change what they cost; all others are reported by their first word.
DETAILED = (*TENSOR, "MUFU", "LDSM", "STSM", "LDG", "LDGSTS", "LDS", "STS", "LDL", "STL", "STG",
            "WARPGROUP", "SYNCS", "UTMALDG")  # fmt: skip
_WIDTH = re.compile(r"\.(32|64|128)$|\.(U8|S8|U16|S16)(?=\.|$)")
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)[ ;]([^;]*)")
_ALWAYS = 7  # the predicate PT
PRODUCT, EXP2 = 1, 2  # what a path through a loop over keys holds
_UNIFORM_BRANCH = 0x547
_UNKNOWN = "?"  # an encoding that the disassembler did not print

_base: dict[int, str] = {}  # architecture and low 12 bits of an encoding -> first word
_detail: dict[tuple[int, int, int], str] = {}  # ... with the bits that hold modifiers -> name


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
    sections = _sections(cubin)
    text = next((data for name, data in sections.items() if name.startswith(".text.")), None)
    if text is None:
        raise CompileError("a cubin must hold a kernel's code, got none; compile the kernel again")
    code = _decode(cubin, text, arch)
    plain, masked = _key_loops(code)
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
    text = next(data for name, data in _sections(cubin).items() if name.startswith(".text."))
    names = {name.partition(".")[0] for name, _, _ in _decode(cubin, text, report.arch)}
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


def _sections(cubin: bytes) -> dict[str, bytes]:
    """Name -> contents of each section that has contents."""
    if len(cubin) < 64 or cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, 18)[0] != _EM_CUDA:
        raise CompileError("a cubin must be a 64-bit CUDA ELF file, got other bytes; compile the kernel again")
    try:
        start = struct.unpack_from("<Q", cubin, 0x28)[0]
        size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
        found = {}
        for name, kind, _, _, offset, length in headers:
            begin = headers[names][4] + name
            if kind != 8:  # SHT_NOBITS: occupies no bytes of the file
                found[cubin[begin : cubin.index(b"\0", begin)].decode()] = cubin[offset : offset + length]
        return found
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

# name, address that it may branch to (or None), whether it may go on to the next instruction
Instruction = tuple[str, "int | None", bool]


def _decode(cubin: bytes, text: bytes, arch: int) -> list[Instruction]:
    """The kernel's instructions in address order; asks the disassembler only about encodings it never saw."""
    words = list(struct.iter_unpack("<QQ", text[: len(text) // INSTRUCTION_BYTES * INSTRUCTION_BYTES]))
    names = [_name(arch, low, high) for low, high in words]
    if None in names and _recall():
        names = [_name(arch, low, high) for low, high in words]
    if None in names:
        for at, spelt, rest in _disassemble(cubin):
            low, high = words[at // INSTRUCTION_BYTES]
            _learn(arch, low, high, spelt, rest)
        _keep()
        names = [_name(arch, low, high) or _UNKNOWN for low, high in words]
    code: list[Instruction] = []
    for i, ((low, high), name) in enumerate(zip(words, names, strict=True)):
        target, goes_on = _flow(name or _UNKNOWN, i * INSTRUCTION_BYTES, low, high, arch)
        code.append((name or _UNKNOWN, target, goes_on))
    return code


def _name(arch: int, low: int, high: int) -> str | None:
    opcode = arch << 12 | low & 0xFFF
    base = _base.get(opcode)
    if base is None or base not in DETAILED:
        return base
    return _detail.get((opcode, *_name_bits(base, low, high)))


def _name_bits(base: str, low: int, high: int) -> tuple[int, int]:
    """The bits that hold an instruction's modifiers: 72 to 104, without the predicates that it reads and writes."""
    # The size of an asynchronous product, and of a copy to or from tensor memory, stands where others hold an address.
    shape = low >> 48 & 0x3FFF if base in ("HGMMA", "QGMMA") else 0
    return shape, high >> 8 & 0x1FFFFFFFF & ~(0x3FF << 9)


def _learn(arch: int, low: int, high: int, name: str, rest: str) -> None:
    base = name.partition(".")[0]
    opcode = arch << 12 | low & 0xFFF
    _base[opcode] = base
    if base in DETAILED:
        _detail[(opcode, *_name_bits(base, low, high))] = _short(base, name, rest)


def _recall() -> bool:
    """Takes what other processes learned; whether there was anything."""
    heard = encodings.recall(disassembler())
    for bits, name in heard.items():
        if len(bits) == 1:
            _base.setdefault(bits[0], name)
        elif len(bits) == 3:
            _detail.setdefault((bits[0], bits[1], bits[2]), name)
    return bool(heard)


def _keep() -> None:
    """Tells other processes what this one knows."""
    known: encodings.Names = {(opcode,): name for opcode, name in _base.items()}
    known.update(_detail.items())
    encodings.keep(disassembler(), known)


def _short(base: str, name: str, operands: str) -> str:
    """The name with only those modifiers that change the cost."""
    if base in ("LDG", "LDGSTS", "LDS", "STS", "LDL", "STL", "STG"):
        width = _WIDTH.search(name)
        return base + (f".{width[1] or width[2]}" if width else "")
    if base in ("HGMMA", "QGMMA"):  # the left factor comes from registers (RS) or from shared memory (SS)
        return name + (".RS" if re.match(r"\s*R\d+, R\d+", operands) else ".SS")
    return name


def _disassemble(cubin: bytes) -> Iterator[tuple[int, str, str]]:
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


# --- loops ------------------------------------------------------------------------------------------------------------


def _flow(name: str, at: int, low: int, high: int, arch: int) -> tuple[int | None, bool]:
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


def _blocks(code: list[Instruction]) -> tuple[list[list[str]], list[list[int]]]:
    """Basic blocks (names of their instructions) and the blocks that may follow each."""
    starts = {0}
    for i, (_, target, goes_on) in enumerate(code):
        if target is not None:
            starts.add(target // INSTRUCTION_BYTES)
        if target is not None or not goes_on:
            starts.add(i + 1)
    order = sorted(start for start in starts if 0 <= start < len(code))
    number = {start: n for n, start in enumerate(order)}
    blocks, after = [], []
    for start, stop in zip(order, [*order[1:], len(code)], strict=True):
        _, target, goes_on = code[stop - 1]
        nexts = [number[stop]] if goes_on and stop in number else []
        if target is not None and target // INSTRUCTION_BYTES in number:
            nexts.append(number[target // INSTRUCTION_BYTES])
        blocks.append([name for name, _, _ in code[start:stop]])
        after.append(nexts)
    return blocks, after


def _dominators(after: list[list[int]]) -> tuple[list[int], dict[int, int]]:
    """Reachable blocks in reverse postorder, and the immediate dominator of each (Cooper, Harvey and Kennedy 2001)."""
    order: list[int] = []
    seen, stack = {0}, [(0, iter(after[0]))]
    while stack:
        block, nexts = stack[-1]
        follower = next((n for n in nexts if n not in seen), None)
        if follower is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(follower)
            stack.append((follower, iter(after[follower])))
    order.reverse()
    place = {block: i for i, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for follower in after[block]:
            before[follower].append(block)
    parent, changed = {0: 0}, True
    while changed:
        changed = False
        for block in order[1:]:
            known = [b for b in before[block] if b in parent]
            best = known[0]
            for other in known[1:]:
                while other != best:
                    if place[other] > place[best]:
                        other = parent[other]
                    else:
                        best = parent[best]
            if parent.get(block) != best:
                parent[block], changed = best, True
    return order, parent


def _natural_loops(after: list[list[int]], order: list[int], parent: dict[int, int]) -> dict[int, set[int]]:
    """Head -> blocks of each natural loop."""
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for follower in after[block]:
            before[follower].append(block)
    loops: dict[int, set[int]] = {}
    for block in order:
        for head in after[block]:
            above = block
            while above != head and above != 0:
                above = parent[above]
            if above != head:
                continue
            body, todo = loops.setdefault(head, {head}), [block]
            while todo:
                member = todo.pop()
                if member not in body:
                    body.add(member)
                    todo += before[member]
    return loops


def _passes(
    head: int, body: set[int], blocks: list[list[str]], after: list[list[int]], order: list[int], wanted: int
) -> tuple[list[str], list[str]]:
    """The lightest and the heaviest path from the head back to the head, through all that is `wanted` (_kinds)."""
    place = {block: i for i, block in enumerate(order)}
    has = {block: _kinds(blocks[block]) for block in body}
    # block -> kinds met on the way -> (instructions, path), for the lightest and the heaviest way there
    light: dict[int, dict[int, tuple[int, list[int]]]] = {head: {has[head]: (len(blocks[head]), [head])}}
    heavy = {head: dict(light[head])}
    ends: list[list[tuple[int, list[int]]]] = [[], []]
    for block in sorted(body, key=place.__getitem__):
        for side, better in ((light, min), (heavy, max)):
            for kinds, (cost, path) in side.get(block, {}).items():
                for follower in after[block]:
                    if follower == head and kinds & wanted == wanted:
                        ends[side is heavy].append((cost, path))
                    elif follower in body and place[follower] > place[block]:
                        way = (cost + len(blocks[follower]), [*path, follower])
                        states = side.setdefault(follower, {})
                        met = kinds | has[follower]
                        states[met] = better(states[met], way) if met in states else way
    chosen = (min(ends[0], default=(0, [])), max(ends[1], default=(0, [])))
    lightest, heaviest = ([name for block in path for name in blocks[block]] for _, path in chosen)
    return lightest, heaviest


def _kinds(names: list[str]) -> int:
    """PRODUCT if a matrix product is among them, plus EXP2 if an exp2 is."""
    fused = names.count("FFMA")  # IEEE float32: 2 * head_dim of them per exp2, where scaling a score takes one
    product = fused >= 24 and fused > 8 * names.count("MUFU.EX2")
    product = product or any(name.partition(".")[0] in TENSOR for name in names)
    return PRODUCT * product + EXP2 * ("MUFU.EX2" in names)


def _key_loops(code: list[Instruction]) -> tuple[list[str], list[str]]:
    """Names of the instructions in a pass of the loop over keys that masks nothing, and of the one that masks."""
    blocks, after = _blocks(code)
    order, parent = _dominators(after)
    passes = []
    loops = _natural_loops(after, order, parent)
    loading = [body for body in loops.values() if any(_loads(blocks[block]) for block in body)]
    for wanted in (PRODUCT | EXP2, PRODUCT):  # a kernel without softmax has products alone
        holding = {h: b for h, b in loops.items() if any(_passes(h, b, blocks, after, order, wanted))}
        seldom = {head for head, body in holding.items() if any(inner < body for inner in loading)}
        if len(seldom) < len(holding):
            holding = {head: body for head, body in holding.items() if head not in seldom}
        for head in sorted(holding):
            if not any(other != head and holding[other] < holding[head] for other in holding):
                passes.append(_passes(head, holding[head], blocks, after, order, wanted))
        if passes:
            break
    if not passes:  # nothing that looks like attention: the whole kernel once is the honest upper bound
        return [name for name, _, _ in code], []
    passes = _without_flags(passes)
    fewest = min(_maxima(light) for light, _ in passes)
    passes = [p for p in passes if _maxima(p[0]) <= fewest + 8] or passes
    plain = min((light for light, _ in passes), key=lambda names: (_masking(names), len(names)))
    masked = max((heavy for _, heavy in passes), key=lambda names: (_masking(names), -len(names)))
    # A mask selects once per score, and each score has an exp2; without softmax, loops that count on a few select less.
    masks = _masking(masked) - _masking(plain) > (masked.count("MUFU.EX2") / 2 or 8)
    return plain, masked if masks else []


def _without_flags(passes: list[tuple[list[str], list[str]]]) -> list[tuple[list[str], list[str]]]:
    """The passes without those of second chances that multiply more: the weights with flags of NaN and infinity too."""
    tensor = any(_tensor(light) for light, _ in passes)
    products = [_tensor(light) if tensor else light.count("FFMA") for light, _ in passes]
    fewest = min((count for count in products if count), default=0)
    return [
        one for one, count in zip(passes, products, strict=True) if (not tensor or count) and 5 * count <= 6 * fewest
    ]


def _tensor(names: list[str]) -> int:
    return sum(name.partition(".")[0] in TENSOR for name in names)


def _loads(names: list[str]) -> bool:
    return any(name.partition(".")[0] == "LDG" for name in names)


def _masking(names: list[str]) -> int:
    return sum(name in MASKING for name in names)


def _maxima(names: list[str]) -> int:
    return sum(name in ("FMNMX", "FMNMX3") for name in names)
