"""Options of a search, and the progress that it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from autoattn.codegen import resources
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.problem import Problem
from autoattn.errors import HostError


class Effort(str, Enum):
    """How much to spend on a problem."""

    INSTANT = "instant"  # seeds alone
    QUICK = "quick"
    STANDARD = "standard"
    MAX = "max"


class Objective(str, Enum):
    """What the winner is to be best at; what is equal by it is decided by time."""

    TIME = "time"
    ENERGY = "energy"  # joules per call, of the whole card under the load of such calls
    ERROR = "error"  # root mean square error against float64


class Peers(str, Enum):
    """Which installed peers an effort has time for in its finals."""

    NONE = "none"
    READY = "ready"  # those that need no compiler for each problem
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What an effort buys for one problem."""

    trials: int  # distinct variants
    # From the first result on, less the finals of other problems; then no new variant is begun: huge problems take
    # seconds a call.
    search_seconds: float
    kernels: int  # new kernels without a GPU for a kind of problems, which all of them share
    sibling_kernels: float  # more of them for each further problem of the kind
    finalists: int
    final_seconds: float  # of rounds, at most: they end when all is decided
    energy_seconds: float  # of calls in a row for each contestant, to count its energy; 0 counts none
    peers: Peers  # who takes part in the finals beside PyTorch's backends
    seeds_only: bool = False  # whether nothing is tried but seeds and what was tuned before


PROFILES = {
    Effort.INSTANT: Profile(
        trials=8,
        search_seconds=2.0,
        kernels=8,
        sibling_kernels=1,
        finalists=3,
        final_seconds=0.4,
        energy_seconds=0.0,
        peers=Peers.NONE,
        seeds_only=True,
    ),
    Effort.QUICK: Profile(
        trials=32,
        search_seconds=12.0,
        kernels=7,
        sibling_kernels=0.5,
        finalists=5,
        final_seconds=2.0,
        energy_seconds=0.0,
        peers=Peers.READY,
    ),
    Effort.STANDARD: Profile(
        trials=32,
        search_seconds=180.0,
        kernels=7,
        sibling_kernels=0.5,
        finalists=5,
        final_seconds=5.0,
        energy_seconds=0.3,
        peers=Peers.ALL,
    ),
    Effort.MAX: Profile(
        trials=200,
        search_seconds=1800.0,
        kernels=200,
        sibling_kernels=24,
        finalists=8,
        final_seconds=15.0,
        energy_seconds=1.0,
        peers=Peers.ALL,
    ),
}
ENERGY_SECONDS = 0.5  # at least, where the energy decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to tune."""

    effort: Effort = Effort.STANDARD
    trials: int | None = None  # distinct variants per problem; the effort's own when None
    timeout_s: float | None = None  # of a problem's search, in place of the effort's search_seconds
    seed: int = 0
    cache: Path = field(default_factory=resources.user_cache)
    jobs: int | None = None  # compiler processes; one per core when None
    objective: Objective = Objective.TIME
    storage: str | None = None  # URL of the trials that other processes share; a journal in the cache when None
    workers: int | None = None  # GPUs that measure; all that are such a device when None

    @property
    def profile(self) -> Profile:
        """How long the effort searches."""
        return PROFILES[self.effort]

    @property
    def search_seconds(self) -> float:
        """After so long no new variant of a problem begins."""
        return self.timeout_s if self.timeout_s is not None else self.profile.search_seconds

    @property
    def energy_seconds(self) -> float:
        """Of calls in a row for each finalist and rival, to count their energy."""
        least = ENERGY_SECONDS if self.objective is Objective.ENERGY else 0.0
        return max(least, self.profile.energy_seconds)

    @property
    def budget(self) -> int:
        """Variants to try for each problem."""
        return self.trials if self.trials is not None else self.profile.trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the tuner tells whoever listens."""

    problem: Problem
    index: int  # from 0
    total: int
    phase: str  # "search", "final", "done" or "kept"
    tried: int
    planned: int
    best_us: float | None
    best_tflops: float | None
    detail: str = ""
    share: float | None = None  # of the run's work that is done, as far as the tuner can tell; kept entries are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run left behind."""

    entries: dict[str, CacheEntry]  # problem key -> entry, kept ones included
    kept: int  # entries that were up to date
    failed: dict[str, str]  # problem key -> why there is no entry
    interrupted: bool
    outcomes: dict[str, int]  # trials of this run
    rehearsals: dict[str, int] = field(default_factory=dict)  # variants that an interpreter ran, without the card
    reasons: dict[str, int] = field(default_factory=dict)  # why variants failed, in words, the commonest first
    stopped: HostError | None = None  # what the machine lacks, which ended the run before all problems were reached
    kernels: int  # distinct kernels compiled and read
    seconds: float
    written: tuple[Path, ...] = ()  # cache files that hold these entries
    compiling_seconds: float = 0.0  # of all compiler processes together
    card_seconds: float = 0.0  # of all GPUs together


Listener = Callable[[Progress], None]
