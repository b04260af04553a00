"""Peers in the finals: attention of others that is timed beside our kernels, and to which no call is dispatched.

Their packages are imported in the GPU's worker alone, and only when finals ask for them.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from autoattn.baselines import external
from autoattn.baselines.external import Peer
from autoattn.core.problem import Op, Problem
from autoattn.hardware.timer import HIDDEN_US, Call, Stopwatch
from autoattn.search.search_options import PROFILES, Effort, Peers

SLOW = 10.0  # a peer this many times slower than our fastest kernel only takes time from the rounds
MOST_SPINS = 8  # of the GPU before each sample; they hide the host's work, and a round of many calls has many
HOST_LOOKS = 3  # calls whose time on the host is taken; the quickest counts
NOT_FINITE = "wrong: its answer has NaN or inf where the reference has none"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerCall:
    """A peer whose answer is known, ready to be timed."""

    call: Call
    max_error: float  # against the reference of the finalists
    rms_error: float
    host_us: float  # microseconds that a call keeps the CPU

    @property
    def spins(self) -> int:
        """How many spins of the GPU hide the host's work."""
        return min(MOST_SPINS, max(1, math.ceil(self.host_us / HIDDEN_US)))


def invited(problem: Problem, effort: Effort) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the peers that finals of an effort ask for, and why the others are not asked for.

    Nothing is imported for it.
    """
    choice = PROFILES[effort].peers
    names, absent = [], {}
    for name in external.FINALS_PEERS:
        peer = external.PEERS[name]
        if choice is Peers.ALL or (choice is Peers.READY and not peer.compiles):
            names.append(name)
        elif not peer.is_installed:
            absent[name] = f"not installed (no package {peer.package})"
        else:
            absent[name] = peer.refuses(problem) or why_no_time(peer, effort)
    return tuple(names), absent


def why_no_time(peer: Peer, effort: Effort) -> str:
    """Why an effort does not ask for a peer that is installed."""
    need = "it compiles for each problem" if peer.compiles else "its package must be imported"
    return f"{need}, for which --effort {effort.value} leaves no time"


def prepare(name: str, case: Any, gates: ModuleType) -> PeerCall | str:
    """A peer on the tensors of a case, or in one clause why it does not take part.

    Args:
        gates: the module of the gate for the case's operation, output_check or gradient_check.

    Raises:
        RuntimeError: it broke the GPU, so that nothing more can run in this process.
    """
    peer = external.PEERS[name]
    problem, device = case.problem, case.operands.query.device
    reason = peer.why_not(problem)
    if reason is not None:
        return reason
    try:
        with warnings.catch_warnings(), external.settled(problem):
            warnings.simplefilter("ignore")  # what a package has to say of itself
            return _checked(peer, case, gates)
    except Exception as error:  # a package raises what it likes
        _synchronize(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return reason_of(error)


def _checked(peer: Peer, case: Any, gates: ModuleType) -> PeerCall | str:
    problem = case.problem
    call: Call = gates.peer_call(peer, case)
    answer: Any = call()
    errors = gates.errors(answer, case)
    if not all(map(math.isfinite, errors)):
        return NOT_FINITE
    if problem.op is Op.BACKWARD and problem.deterministic and (why := gates.unlike(answer, call())):
        return f"its gradients do not repeat to the bit ({why})"
    del answer
    if peer.compiles:
        call = partial(_run_as_compiled, problem, call)
    max_error, rms_error = errors
    host_us = _host_us(call, case.operands.query.device)
    return PeerCall(call=call, max_error=max_error, rms_error=rms_error, host_us=host_us)


def _run_as_compiled(problem: Problem, call: Call) -> object:
    with external.compile_settings(problem):
        return call()


def reason_of(error: Exception) -> str:
    """An exception of a peer in one clause."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of GPU memory"
    return f"it raised {type(error).__name__}: {' '.join(str(error).split())[:160]}".rstrip(": ")


def _host_us(call: Call, device: torch.device) -> float:
    """Microseconds that a call keeps the CPU, on a GPU that has nothing else to do."""
    taken = []
    for _ in range(HOST_LOOKS):
        _synchronize(device)
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    _synchronize(device)
    return min(taken) * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def why_slow(peer: PeerCall, stopwatch: Stopwatch, best_us: float | None) -> str | None:
    """Why a peer is no contestant by a first look at its time; None when it is one, or no time of ours is known.

    Args:
        best_us: the time of our fastest kernel at its own first look.
    """
    stopwatch.warm()
    time_us = min(stopwatch.samples(peer.call, 2))
    if best_us is None or time_us <= SLOW * best_us:
        return None
    return f"too slow: {time_us:.0f} us at a first look, where our fastest kernel takes {best_us:.0f} us"
