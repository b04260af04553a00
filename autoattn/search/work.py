"""How much of a run's work is done, as far as can be told before its end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Work:
    """The parts of a run: how much work each of them is, and how far it got."""

    _sizes: dict[int, float] = field(default_factory=dict)
    _done: dict[int, float] = field(default_factory=dict)  # 0 to 1

    def expect(self, part: int, size: float) -> None:
        """Adds a part, whose size is in a unit that all parts have."""
        self._sizes[part], self._done[part] = size, 0.0

    def drop(self, part: int) -> None:
        """Takes a part away that turned out to be none."""
        del self._sizes[part], self._done[part]

    def note(self, part: int, done: float) -> None:
        """Takes how much of a part is done, from 0 to 1."""
        self._done[part] = done

    @property
    def share(self) -> float:
        """How much of all is done, from 0 to 1."""
        total = sum(self._sizes.values())
        return sum(size * self._done[part] for part, size in self._sizes.items()) / total if total else 1.0
