"""Which GPU looks at the variants of a problem, and has its finals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from autoattn.core.problem import Problem


class GpuAssignment:
    """Gives each problem a home: the GPU of its looks and its finals, since times of two GPUs of a model differ.

    Problems take the GPUs in turn. A GPU that is the home of no search looks at variants of others too.
    """

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._homes: dict[Problem, int] = {}
        self._searched: set[Problem] = set()  # now

    @contextlib.contextmanager
    def searching(self, problem: Problem) -> Iterator[None]:
        """While it lasts, the problem's home serves no search that has another one."""
        self._searched.add(problem)
        try:
            yield
        finally:
            self._searched.discard(problem)

    def home_of(self, problem: Problem) -> int:
        """The place of a problem's home among the GPUs, from 0."""
        return self._homes.setdefault(problem, len(self._homes) % self._gpus)

    def places_for(self, problem: Problem) -> list[int]:
        """The GPUs that may look at a problem's variants, its home first."""
        taken = {self.home_of(searched) for searched in self._searched}
        return [self.home_of(problem), *(place for place in range(self._gpus) if place not in taken)]

    def free_for(self, problem: Problem, looks: Iterable[tuple[Problem, int]]) -> list[int]:
        """Those of them that have room for one more variant of it.

        A GPU looks at one variant of a problem at a time. At home, another problem's may wait behind it, so that the
        GPU need not wait for the samplers.

        Args:
            looks: problems whose variants are looked at, or wait for that, and the places of the GPUs.
        """
        there: dict[int, list[Problem]] = {}
        for looked_at, place in looks:
            there.setdefault(place, []).append(looked_at)
        home = self.home_of(problem)
        return [
            place
            for place in self.places_for(problem)
            if problem not in there.get(place, []) and len(there.get(place, [])) < 1 + (place == home)
        ]
