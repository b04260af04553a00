"""PTX that kernels state in text: the few dozen instructions of it that the templates use, on all lanes at once.

A register holds bits: int32 or int64 of each lane, or booleans of a predicate. An instruction says what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from autoattn.errors import InterpretationError
from autoattn.kernels.gluon_interpreter import mbarriers, scheduler, tma
from autoattn.kernels.gluon_interpreter.tensors import Tensor, converted

_TYPES = {
    "f32": torch.float32,
    "pred": torch.bool,
    **dict.fromkeys(("b32", "u32", "s32", "b16"), torch.int32),
    **dict.fromkeys(("b64", "u64", "s64"), torch.int64),
}
_PAIRS = {"f16x2": (torch.float16, 16), "bf16x2": (torch.bfloat16, 16), "e4m3x2": (torch.float8_e4m3fn, 8)}
_STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_NOTHING = ("bar.warp.sync", "fence.proxy.async.global", "griddepcontrol.wait", "griddepcontrol.launch_dependents")


@dataclass(frozen=True, slots=True)
class _Instruction:
    opcode: str
    operands: tuple[str, ...]
    guard: str = ""  # a predicate
    unless: bool = False  # whether the predicate must be false


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[tuple[_Instruction, ...], dict[str, int]]:
    """The instructions of a text, and its labels with the number of what follows them."""
    body = text.strip()
    if body.startswith("{") and body.endswith("}"):
        body = body[1:-1]
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        rest = statement.strip()
        while label := re.match(r"(\w+):(?!:)\s*", rest):
            labels[label[1]] = len(instructions)
            rest = rest[label.end() :]
        if not rest or rest.startswith(".reg"):
            continue
        match = _STATEMENT.fullmatch(rest)
        if match is None:
            raise InterpretationError(f"the interpreter must know what inline assembly says, got {rest!r:.80}")
        unless, guard, opcode, operands = match.groups()
        instructions.append(_Instruction(opcode, tuple(_OPERANDS.findall(operands)), guard or "", bool(unless)))
    return tuple(instructions), labels


@lru_cache(maxsize=1024)
def _constant(operand: str, wide: bool) -> torch.Tensor:
    """The bits of a number in a text."""
    if operand.startswith("0f"):
        return torch.tensor(int(operand[2:], 16), dtype=torch.int64).to(torch.int32)
    if not re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", operand):
        raise InterpretationError(f"inline assembly must write what it reads, and {operand!r} was not written")
    return torch.tensor(int(operand, 0), dtype=torch.int64).to(torch.int64 if wide else torch.int32)


@dataclass(slots=True, eq=False)
class _Lanes:
    """The threads that run a text, side by side."""

    count: int
    registers: dict[str, torch.Tensor]
    active: torch.Tensor | None = None  # None: all
    skipping: dict[str, torch.Tensor] = field(default_factory=dict)  # label -> lanes that went there

    def read(self, operand: str, kind: str) -> torch.Tensor:
        """An operand as numbers of a type."""
        if operand in self.registers:
            value = self.registers[operand]
        elif operand == "%tid.x":
            value = torch.arange(self.count, dtype=torch.int32)
        elif operand == "%laneid":
            value = torch.arange(self.count, dtype=torch.int32) % 32
        else:
            value = _constant(operand, wide=kind.endswith("64"))
        return value.view(torch.float32) if kind == "f32" and value.dtype is torch.int32 else value

    def write(self, name: str, value: torch.Tensor) -> None:
        """Writes a register in the active lanes."""
        bits = value.view(torch.int32) if value.dtype is torch.float32 else value
        bits = bits.expand(self.count)
        if self.active is not None and name in self.registers:
            bits = torch.where(self.active, bits, self.registers[name])
        self.registers[name] = bits

    def guarded(self, instruction: _Instruction) -> torch.Tensor | None:
        """The lanes that an instruction is for; None for all."""
        if not instruction.guard:
            return self.active
        chosen = self.registers[instruction.guard] ^ instruction.unless
        return chosen if self.active is None else chosen & self.active


def _ternary(compute: Callable[..., torch.Tensor]) -> Callable[[_Lanes, _Instruction], None]:
    """An instruction that computes its first operand of the others, which have the type at its end."""

    def run(lanes: _Lanes, instruction: _Instruction) -> None:
        kind = instruction.opcode.rsplit(".", 1)[1]
        lanes.write(instruction.operands[0], compute(*(lanes.read(name, kind) for name in instruction.operands[1:])))

    return run


def _mov(lanes: _Lanes, instruction: _Instruction) -> None:
    target, source = instruction.operands
    if source.startswith("{"):
        low, high = (lanes.read(part, "b16") for part in _OPERANDS.findall(source[1:-1]))
        lanes.write(target, (low & 0xFFFF) | (high << 16))
    else:
        lanes.write(target, lanes.read(source, instruction.opcode.rsplit(".", 1)[1]))


def _fma(left: torch.Tensor, right: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    return (left.double() * right.double() + added.double()).to(torch.float32)


def _approximate_tanh(value: torch.Tensor) -> torch.Tensor:
    """The hyperbolic tangent rounded to 11 bits: it errs by up to 2^-11, as PTX allows tanh.approx to."""
    bits = torch.tanh(value).view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def _mad(lanes: _Lanes, instruction: _Instruction) -> None:
    target, left, right, added = instruction.operands
    product = lanes.read(left, "u32").to(torch.int64) * lanes.read(right, "u32").to(torch.int64)
    lanes.write(target, product + lanes.read(added, "u64"))


def _setp(lanes: _Lanes, instruction: _Instruction) -> None:
    _, test, kind = instruction.opcode.split(".")
    target, left, right = instruction.operands
    first, second = lanes.read(left, kind), lanes.read(right, kind)
    tests = {"eq": torch.eq, "neu": torch.ne, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt}
    if test not in tests:
        raise InterpretationError(f"the interpreter must know what inline assembly says, got setp.{test}")
    lanes.write(target, tests[test](first, second))


def _vote(lanes: _Lanes, instruction: _Instruction) -> None:
    if not instruction.opcode.startswith("vote.sync.any") or instruction.operands[2] != "0xffffffff":
        raise InterpretationError(f"a vote must be of any lane of the warp here, got {instruction.opcode}")
    votes = lanes.read(instruction.operands[1], "pred").reshape(-1, 32)
    lanes.write(instruction.operands[0], votes.any(1, keepdim=True).expand(-1, 32).reshape(-1))


def _cvt(lanes: _Lanes, instruction: _Instruction) -> None:
    kind = instruction.opcode.split(".")[-2]
    if kind not in _PAIRS:
        raise InterpretationError(f"the interpreter must know what inline assembly says, got {instruction.opcode}")
    dtype, bits = _PAIRS[kind]
    target, high, low = instruction.operands
    words = [
        converted(lanes.read(name, "f32"), dtype).view(torch.int16 if bits == 16 else torch.uint8)
        for name in (high, low)
    ]
    upper, lower = (word.to(torch.int32) & ((1 << bits) - 1) for word in words)
    lanes.write(target, (upper << bits) | lower)


def _memory(lanes: _Lanes, instruction: _Instruction) -> None:
    """ld, st and red of global memory; `.v4` has four numbers in a row."""
    parts, memory = instruction.opcode.split("."), scheduler.current().program.memory
    kind = _TYPES[parts[-1]]
    place, numbers = instruction.operands[:2] if parts[0] != "ld" else instruction.operands[::-1]
    base, _, offset = place[1:-1].partition("+")
    address = lanes.read(base, "u64") + int(offset or 0)
    chosen = lanes.guarded(instruction)
    names = _OPERANDS.findall(numbers[1:-1]) if numbers.startswith("{") else [numbers]
    for step, name in enumerate(names):
        pointer = Tensor((address + step * kind.itemsize).expand(lanes.count), kind)
        if parts[0] == "ld":
            lanes.write(name, memory.load(pointer, None, None).data)
            continue
        value = lanes.read(name, parts[-1]).expand(lanes.count)
        if chosen is not None:
            pointer, value = Tensor(pointer.data[chosen], kind), value[chosen]
        if parts[0] == "st":
            memory.store(pointer, Tensor(value), None)
        elif pointer.data.numel():
            memory.add(pointer, Tensor(value))


def _bar(lanes: _Lanes, instruction: _Instruction) -> None:
    number, threads = (int(lanes.read(name, "u32").reshape(-1)[0]) for name in instruction.operands)
    mbarriers.meet(number, threads, waits=instruction.opcode == "bar.sync")


_INSTRUCTIONS: dict[str, Callable[[_Lanes, _Instruction], None]] = {
    "mov": _mov,
    "add": _ternary(torch.add),
    "sub": _ternary(torch.sub),
    "mul": _ternary(torch.mul),
    "fma": _ternary(_fma),
    "max": _ternary(torch.maximum),  # .NaN: NaN stays
    "min": _ternary(torch.minimum),
    "and": _ternary(torch.bitwise_and),
    "shl": _ternary(torch.bitwise_left_shift),
    "ex2": _ternary(torch.exp2),
    "rcp": _ternary(torch.reciprocal),
    "tanh": _ternary(_approximate_tanh),
    "mad": _mad,
    "setp": _setp,
    "vote": _vote,
    "cvt": _cvt,
    **dict.fromkeys(("ld", "st", "red"), _memory),
    "bar": _bar,
    "cp": lambda lanes, instruction: tma.write_wait(),
}


def _run(text: str, lanes: _Lanes) -> None:
    instructions, labels = _parsed(text)
    at = 0
    while at < len(instructions):
        for label, place in labels.items():
            if place == at and (came := lanes.skipping.pop(label, None)) is not None:
                active = came if lanes.active is None else lanes.active | came
                lanes.active = None if bool(active.all()) else active
        instruction = instructions[at]
        at += 1
        name = instruction.opcode.split(".")[0]
        if name == "bra":
            at = _branch(lanes, instruction, at, labels)
        elif instruction.opcode not in _NOTHING:
            if name not in _INSTRUCTIONS or (instruction.guard and name not in ("red", "st")):
                raise InterpretationError(f"the interpreter must know what inline assembly says, got {instruction}")
            _INSTRUCTIONS[name](lanes, instruction)


def _branch(lanes: _Lanes, instruction: _Instruction, at: int, labels: dict[str, int]) -> int:
    """Where the program goes on: lanes that jump ahead stand still until the others come there."""
    (label,) = instruction.operands
    jumps = lanes.guarded(instruction)
    jumps = torch.ones(lanes.count, dtype=torch.bool) if jumps is None else jumps
    if labels[label] >= at:
        staying = ~jumps if lanes.active is None else lanes.active & ~jumps
        lanes.skipping[label] = jumps
        lanes.active = staying
        return at if bool(staying.any()) else labels[label]
    if bool(jumps.any()):
        _spin()
        return labels[label]
    return at


def _spin() -> None:
    """Lets others run before a loop looks again at memory: until somebody writes."""
    partition, line = scheduler.current(), scheduler.line()
    memory = partition.program.memory
    writes = memory.writes
    partition.program.wait(
        partition,
        lambda: memory.writes != writes,
        lambda: f"memory that it looks at in line {line}, and that no program before this one has written",
    )


def inline_asm_elementwise(asm: str, constraints: str, args: Sequence[Any], dtype: torch.dtype, is_pure: bool,
                           pack: int) -> Tensor:  # fmt: skip
    """Runs a text for each `pack` elements of the arguments, which are broadcast."""
    kinds = constraints.split(",")
    outputs = [kind for kind in kinds if kind.startswith("=")]
    blocks = torch.broadcast_tensors(*(arg.data for arg in args)) if args else ()
    shape = blocks[0].shape if blocks else torch.Size()
    columns: list[torch.Tensor] = []
    for block in blocks:
        bits = block.view(torch.int32) if block.dtype is torch.float32 else block
        columns += _dealt(bits, pack).unbind(1)
    count = columns[0].shape[0] if columns else 32 * scheduler.current().warps
    tied = {f"${kind}": column for kind, column in zip(kinds[len(outputs) :], columns, strict=True) if kind.isdigit()}
    registers = {f"${len(outputs) + place}": column for place, column in enumerate(columns)} | tied
    lanes = _Lanes(count, registers)
    _run(asm, lanes)
    nothing = torch.zeros(count, dtype=torch.int32)
    words = torch.stack([lanes.registers.get(f"${place}", nothing) for place in range(len(outputs))], 1)
    return Tensor(_collected(words.contiguous().view(dtype), shape, pack))


def _owned(shape: torch.Size, pack: int) -> bool:
    """Whether a text has all elements of a thread, of a block that lies as products of a warpgroup do."""
    return len(shape) == 2 and shape[0] == 64 and pack > 1 and pack == shape[1] // 2


def _dealt(block: torch.Tensor, pack: int) -> torch.Tensor:
    """[lanes, pack]: the elements of each thread; those of a scalar are the same in all threads of the partition."""
    if not block.dim():
        return block.expand(32 * scheduler.current().warps, 1)
    if _owned(block.shape, pack):  # PTX ISA, register fragments of wgmma's D
        # warp, half of 16 rows, row of 8, group of 8 columns, lane of 4, column of 2
        parts = block.reshape(4, 2, 8, block.shape[1] // 8, 4, 2)
        return parts.permute(0, 2, 4, 3, 1, 5).reshape(128, pack)
    return block.reshape(-1, pack)


def _collected(words: torch.Tensor, shape: torch.Size, pack: int) -> torch.Tensor:
    """What `_dealt` undoes."""
    if not shape:
        return words[0, 0].clone()
    if _owned(shape, pack):
        return words.reshape(4, 8, 4, shape[1] // 8, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(shape)
    return words.reshape(shape)
