"""Lays out a kernel's PTX so that ptxas puts the code that rarely runs behind the code that always runs.

A launch on Hopper brings the first 64 KB of a kernel's code into the instruction cache. What lies behind is fetched
when it is reached, which takes a kernel 7 to 12 us where other kernels ran before it (docs/decisions/code-layout.md).
ptxas orders code by the graph of branches, not by its place in the text. So the graph changes, in ways that compute
nothing else:

- A role that computes tiles again ends its warps, by a copy of what they would have done next. Else it belongs to the
  loop in which warps wait for roles, and ptxas keeps a loop together.
- The kernel's first block has a branch to each such role, which is never taken. What can be reached from there may lie
  behind everything else.
- Where the first warps go on to such a role or to the end, the end is what lies below.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

# What computes tiles again begins so, and nothing else does: wait_written() of gluon/forward.
AGAIN = "cp.async.bulk.wait_group 0; mov"
_LABEL = re.compile(r"(\$L_\w+):")
BRANCH = re.compile(r"\s*(?P<condition>@!?%\w+\s+)?bra(?:\.uni)?\s+(?P<target>\$L_\w+);")
TABLE = re.compile(r"([$\w]+):\s*\.branchtargets([^;]*);")  # of a branch by an index
_INDEXED = re.compile(r"brx\.idx\s+%\w+,\s*([$\w]+);")
_BARRIER = "barrier.sync"  # at which warps wait for a role
NEVER = (
    "\t.reg .pred \t%never;",
    "\t.reg .b32 \t%row;",
    "\tmov.u32 \t%row, %ctaid.y;",
    "\tsetp.eq.s32 \t%never, %row, 65535;",  # grids of ours have one row of programs
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Instructions that run one after another."""

    label: str
    lines: tuple[str, ...]
    targets: tuple[str, ...] = ()  # of the branch at its end
    below: str | None = None  # the block that runs next where no branch is taken

    @property
    def successors(self) -> tuple[str, ...]:
        """The blocks that may run next."""
        return self.targets if self.below is None else (*self.targets, self.below)


def rare_code_last(ptx: str) -> str:
    """The same kernel, whose code that computes tiles again can lie behind the rest.

    A kernel that computes nothing again stays as it is, and so does one whose warps do not wait for their roles as in
    the Tritons from 3.6 on.
    """
    if AGAIN not in ptx:
        return ptx
    body, blocks = _body(ptx), blocks_of(ptx)
    heads = _rare_heads(blocks.values())
    if len(_reachable(blocks, without=())) < len(blocks):
        return ptx
    common = _reachable(blocks, without=heads)
    rare = [block for label, block in blocks.items() if label not in common]
    left = dict.fromkeys(label for block in rare for label in block.successors if label in common)
    ends = {label: end_block for label in left if (end_block := _end_of(blocks, label)) is not None}
    if len(ends) < len(left):
        return ptx
    first, *others = (block for label, block in blocks.items() if label in common)
    common_blocks = [_reaching(first, heads), *(_past(block, heads) for block in others)]
    lines = _lines([*common_blocks, *(_redirected(block, ends) for block in rare), *ends.values()])
    return ptx[: body.start] + "\n".join(lines) + "\n" + ptx[body.stop :]


def blocks_of(ptx: str) -> dict[str, Block]:
    """Label -> block of a kernel's PTX, in the order of the text; the first one runs first."""
    body = ptx[_body(ptx)]
    tables = {name: tuple(label.strip() for label in labels.split(",")) for name, labels in TABLE.findall(body)}
    return {block.label: block for block in _blocks(body.splitlines(), tables)}


def _body(ptx: str) -> slice:
    """Where the lines between the braces of a kernel stand."""
    begin = ptx.index("{", ptx.index(".visible .entry")) + 2
    return slice(begin, ptx.rindex("\n", 0, ptx.index("-- End function", begin)) + 1)


def _blocks(body: Iterable[str], tables: Mapping[str, tuple[str, ...]]) -> Iterator[Block]:
    """Cuts the lines of a kernel's body before each label and behind each branch that may not be taken."""
    label, lines, count = "$L_first", list[str](), 0
    for line in body:
        if match := _LABEL.match(line):
            yield _block(label, lines, match[1], tables)
            label, lines = match[1], []
            continue
        lines.append(line)
        if (branch := BRANCH.match(line)) and branch["condition"]:
            count += 1
            yield _block(label, lines, following := f"$L_behind{count}", tables)
            label, lines = following, []
    yield _block(label, lines, None, tables)


def _block(label: str, lines: Sequence[str], following: str | None, tables: Mapping[str, tuple[str, ...]]) -> Block:
    """A block of these lines, behind which another one lies."""
    instructions = [i for i, line in enumerate(map(str.strip, lines)) if line and not line.startswith("//")]
    lines = tuple(lines[: instructions[-1] + 1]) if instructions else ()
    last = lines[-1].strip() if lines else ""
    targets: tuple[str, ...] = ()
    below = following
    if branch := BRANCH.match(last):
        targets, below = (branch["target"],), following if branch["condition"] else None
    elif indexed := _INDEXED.match(last):
        targets, below = tables.get(indexed[1], ()), None
    elif last.startswith(("ret;", "exit;")):
        below = None
    return Block(label=label, lines=lines, targets=targets, below=below)


def _rare_heads(blocks: Collection[Block]) -> list[str]:
    """The blocks that begin what computes tiles again: in the first warps, and in the roles of the others.

    A kernel that may compute again specialises its warps twice, into as many roles. The table by which warps go to
    their role has the roles of the first time, those of the second, and the end. Roles without work may be one block.
    """
    heads = [block.label for block in blocks if any(AGAIN in line for line in block.lines)]
    roles = next((block.targets for block in blocks if len(block.targets) > 1), ())
    first, second = roles[: len(roles) // 2], roles[len(roles) // 2 : -1]
    return list(dict.fromkeys([*heads, *(role for role in second if role not in first)]))


def _reachable(blocks: Mapping[str, Block], *, without: Collection[str]) -> set[str]:
    """The blocks to which the first one leads past those that are left out."""
    reached, waiting = set[str](), [next(iter(blocks))]
    while waiting:
        label = waiting.pop()
        if label not in reached and label not in without:
            reached.add(label)
            waiting += blocks[label].successors
    return reached


def _end_of(blocks: Mapping[str, Block], label: str) -> Block | None:
    """A copy of what runs from a block on, up to the kernel's end or the wait for another role, which is to end.

    None where it goes on to neither of them.
    """
    lines, block = list[str](), blocks[label]
    while len(block.successors) == 1:
        lines += block.lines[:-1] if block.targets else block.lines
        block = blocks[block.successors[0]]
    lines += block.lines
    if block.successors:
        waits = [i for i, line in enumerate(lines) if _BARRIER in line]
        if not waits:
            return None
        lines[waits[-1] + 1 :] = ["\tret;"]
    return Block(label=f"{label}_end", lines=tuple(lines))


def _redirected(block: Block, ends: Mapping[str, Block]) -> Block:
    """A rare block that goes on to the copies of common ones."""
    lines, below = block.lines, block.below
    for label in block.targets:
        if label in ends:
            lines = (*lines[:-1], lines[-1].replace(f"{label};", f"{ends[label].label};"))
    if below is not None and below in ends:
        below = ends[below].label
    return replace(block, lines=lines, below=below)


def _reaching(first: Block, heads: Iterable[str]) -> Block:
    """The first block, with branches to the others that are never taken."""
    *lines, last = first.lines
    return replace(first, lines=(*lines, *NEVER, *(f"\t@%never bra \t{head};" for head in heads), last))


def _past(block: Block, heads: Collection[str]) -> Block:
    """A block above a rare one, to which it branches now."""
    branch = BRANCH.match(block.lines[-1]) if block.lines else None
    if branch is None or block.below is None or block.below not in heads:
        return block
    condition = branch["condition"].strip()
    condition = condition.replace("@!", "@") if "!" in condition else condition.replace("@", "@!")
    lines = (*block.lines[:-1], f"\t{condition} bra \t{block.below};")
    return replace(block, lines=lines, targets=(block.below,), below=branch["target"])


def _lines(blocks: Sequence[Block]) -> Iterator[str]:
    """The text of blocks that lie in this order."""
    following = [*(block.label for block in blocks[1:]), None]
    for block, label in zip(blocks, following, strict=True):
        yield f"{block.label}:"
        yield from block.lines
        if block.below is not None and block.below != label:
            yield f"\tbra.uni \t{block.below};"
