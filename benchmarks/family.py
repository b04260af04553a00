"""`autoattn` with the templates of one family alone: `python benchmarks/family.py triton tune --device auto ...`.

What plain Triton reaches where Gluon wins, for instance. Tune with a cache of its own (AUTOATTN_CACHE), then time with
`... triton bench ... --ours variants`: a call of the cache's choice may run a rival.
"""

from __future__ import annotations

import sys

from autoattn import cli
from autoattn.codegen import search_space
from autoattn.codegen.search_space import SearchSpace
from autoattn.core.problem import Op

_of = search_space.of


def main() -> None:
    """Runs the command with the other families out of sight."""
    family = sys.argv.pop(1) if len(sys.argv) > 1 else ""

    def of(op: Op) -> tuple[SearchSpace, ...]:
        return tuple(space for space in _of(op) if space.template.startswith(f"{family}/"))

    if not of(Op.FORWARD):
        known = sorted({space.template.partition("/")[0] for space in _of(Op.FORWARD)})
        sys.exit(
            f"benchmarks/family.py needs a family of templates first, got {family!r}; it may be "
            f"{', '.join(known[:-1])} or {known[-1]}"
        )
    search_space.of = of  # type: ignore[assignment]
    cli.main()


if __name__ == "__main__":  # workers import this file again
    main()
