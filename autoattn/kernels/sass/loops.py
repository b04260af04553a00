"""Which loops of a kernel's machine code are reported: those over keys.

A loop is a natural loop of the control-flow graph (a branch back to a block that dominates it). The loops over keys are
the innermost ones that hold a matrix product and an exp2, or a product alone where none holds both: a kernel without
softmax. A pass of such a loop is a path from its head back to its head; where it can branch (a mask that only some
blocks need, a rescale that only some need) the lightest and the heaviest path through all of that are read. Then:

- loops around a loop of its own that loads from memory are left out when others are not: they are the second chance
  that adds values key by key, where these may be NaN or infinite;
- so are loops that multiply more than others do: the same second chance, where one more product finds such values;
- loops that track a running maximum (FMNMX) are left out when another loop does not: they are the second chance of the
  `first_max` softmax, which runs when a tile overflowed;
- `loop` is the lightest path of the loop with the fewest masking instructions (ISETP, FSEL and their kin);
- `masked_loop` is the heaviest path of the loop with the most, where they are more by half of its exp2; else empty.
"""

from __future__ import annotations

INSTRUCTION_BYTES = 16
TENSOR = ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "IMMA", "QGMMA", "OMMA", "QMMA")
MASKING = ("ISETP", "FSEL", "FSETP", "SEL", "PLOP3", "P2R", "R2P", "USEL", "UISETP")
PRODUCT, EXP2 = 1, 2  # what a path through a loop over keys holds

# name, address that it may branch to (or None), whether it may go on to the next instruction
Instruction = tuple[str, "int | None", bool]


def over_keys(code: list[Instruction]) -> tuple[list[str], list[str]]:
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
            if not any(nested != head and holding[nested] < holding[head] for nested in holding):
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
            for finger in known[1:]:
                while finger != best:
                    if place[finger] > place[best]:
                        finger = parent[finger]
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


def _without_flags(passes: list[tuple[list[str], list[str]]]) -> list[tuple[list[str], list[str]]]:
    """The passes without those of second chances that multiply more: the weights with flags of NaN and infinity too."""
    tensor = any(_tensor(light) for light, _ in passes)
    products = [_tensor(light) if tensor else light.count("FFMA") for light, _ in passes]
    fewest = min((count for count in products if count), default=0)
    return [
        pair for pair, count in zip(passes, products, strict=True) if (not tensor or count) and 5 * count <= 6 * fewest
    ]


def _tensor(names: list[str]) -> int:
    return sum(name.partition(".")[0] in TENSOR for name in names)


def _loads(names: list[str]) -> bool:
    return any(name.partition(".")[0] == "LDG" for name in names)


def _masking(names: list[str]) -> int:
    return sum(name in MASKING for name in names)


def _maxima(names: list[str]) -> int:
    return sum(name in ("FMNMX", "FMNMX3") for name in names)
