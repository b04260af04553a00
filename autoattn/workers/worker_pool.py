"""Worker processes: a job may hang, crash or poison its GPU without harm to the search.

A worker does one job at a time. A job is a picklable value with a `run(memory)` method; `memory` is a dictionary that
lives as long as the worker. A worker that exceeds its time or dies is replaced, and its job ends as a Failure.
The children are started as `python -m autoattn.workers.worker_pool`, so that no script of the user's is imported twice.
They end with their parent, however that ended and whatever they do.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol, TypeVar

from autoattn.core.trial import Outcome
from autoattn.errors import HostError
from autoattn.hardware import host_faults

Key = TypeVar("Key", bound=Hashable)
START_SECONDS = 120.0  # importing torch and triton on a busy machine
EXIT_SECONDS = 10.0  # from the end of a connection, or a kill, to the end of its process; a stuck driver takes longer
KILLS = 3  # SIGKILLs of workers at the same job, after which the job is taken to be the reason
STARTS = 10  # SIGKILLs of workers on their way to a job, after which none is expected to arrive
RECYCLE_AFTER = 400  # jobs; the compiler keeps what it compiled


def cores() -> int:
    """How many of the machine's processors this process may use, which is as many workers as have something to do."""
    return len(os.sched_getaffinity(0))


class Job(Protocol):
    """What a worker can do."""

    def run(self, memory: dict[Hashable, Any]) -> Any:
        """Does the work; an exception ends the worker, since it may have poisoned the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A job that gave no result."""

    outcome: Outcome
    detail: str

    @classmethod
    def of(cls, error: BaseException, otherwise: Outcome, detail: str = "") -> Failure:
        """Of an exception: the environment's where it tells of it, else the outcome given, with its words or others."""
        fault = host_faults.fault_of(error)
        if fault is not None:
            return cls(outcome=fault.outcome, detail=fault.sentence)
        return cls(outcome=otherwise, detail=detail or _described(error))


class _Task(NamedTuple):
    ticket: int
    job: bytes  # pickled
    seconds: float  # that it may take
    place: int | None  # of the worker that has to run it; None for any
    kills: int = 0  # of workers that had begun it, from outside
    starts: int = 0  # of workers that were killed before they could begin it


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One process of a pool, and what it does."""

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int  # our end of a pipe that nobody writes to: it closes with this process
    place: int  # among the workers of its pool, from 0
    task: _Task | None = None
    begun: bool = False  # the worker has said that it took the task
    since: float = 0.0  # when it was given the task
    deadline: float = 0.0
    jobs: int = 0
    memory_kills: int = 0  # of any process of the machine, when the worker was given the task


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """Workers of one kind; `submit` queues a job, `next_results` gives those that ended."""

    size: int
    environment: Mapping[str, str] = field(default_factory=dict)
    apart: Sequence[Mapping[str, str]] = ()  # what each place's environment has besides
    # What a worker imports before the clock of its first job runs, since triton is slow, and torch is slower.
    preload: str = "autoattn.workers.compile_job"
    niceness: int = 0  # of its workers, as the system counts it: how far they stand behind others
    busy_seconds: float = 0.0  # that workers had a task, all together, as far as the tasks have ended
    workers: list[Worker] = field(default_factory=list)
    _queue: deque[_Task] = field(default_factory=deque)
    _tickets: int = 0

    def submit(self, job: Job, seconds: float, *, place: int | None = None) -> int:
        """Queues a job that may take `seconds` once it runs; returns its ticket. The job must be picklable.

        With a place, from 0 to `size` - 1, the job runs on the worker there.
        """
        pickled = pickle.dumps(job)
        self._tickets += 1
        self._queue.append(_Task(self._tickets, pickled, seconds, place))
        self._feed()
        return self._tickets

    def result(self, job: Job, seconds: float, *, place: int | None = None) -> Any:
        """Runs one job and waits for it; only for a pool that has nothing else to do."""
        ticket = self.submit(job, seconds, place=place)
        results: dict[int, Any] = {}
        while ticket not in results:
            results.update(self.next_results())
        return results[ticket]

    def results(self, jobs: Mapping[Key, Job], seconds: float) -> Iterator[tuple[Key, Any]]:
        """Runs jobs, and gives the key and the result or Failure of each as it ends; as `result` for an idle pool."""
        keys = {self.submit(job, seconds): key for key, job in jobs.items()}
        while keys:
            for ticket, result in self.next_results():
                yield keys.pop(ticket), result

    def next_results(self) -> list[tuple[int, Any]]:
        """Waits until at least one job ended; returns (ticket, result or Failure) of all that did."""
        return [(ticket, result) for _, ticket, result in next_results(self)]

    def close(self) -> None:
        """Ends all workers, whatever they do."""
        self._queue.clear()
        for worker in list(self.workers):
            self._retire(worker)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.task is not None]

    def _gather(self, ready: set[Any]) -> list[tuple[int, Any]]:
        """What the workers whose connections are ready say, and what became of those whose time is up."""
        results: list[tuple[int, Any]] = []
        for worker in self._busy():
            if worker.connection in ready:
                results += self._receive(worker)
            elif time.monotonic() >= worker.deadline:
                assert worker.task is not None
                detail = f"no answer within {worker.task.seconds:.0f} s"
                results.append((worker.task.ticket, Failure(outcome=Outcome.TIMEOUT, detail=detail)))
                self._retire(worker)
        return results

    def _feed(self) -> None:
        """Gives tasks to whoever is free and did the fewest; a worker is started when none of those that are is."""
        started = {worker.place: worker for worker in self.workers}
        free = [place for place in range(self.size) if place not in started or started[place].task is None]
        free.sort(key=lambda place: started[place].jobs if place in started else math.inf)
        while free and self._queue:
            task = next((task for task in self._queue if task.place is None or task.place in free), None)
            if task is None:
                return
            self._queue.remove(task)
            place = free[0] if task.place is None else task.place
            free.remove(place)
            worker = started.get(place) or self._start(place)
            worker.task, worker.begun, worker.since = task, False, time.monotonic()
            worker.deadline = worker.since + task.seconds + (0.0 if worker.jobs else START_SECONDS)
            worker.memory_kills = host_faults.processes_killed_for_memory()
            with contextlib.suppress(OSError):  # it died, which _receive sees
                worker.connection.send_bytes(task.job)

    def _receive(self, worker: Worker) -> list[tuple[int, Any]]:
        assert worker.task is not None
        try:
            message = worker.connection.recv_bytes()
        except (EOFError, OSError):
            return self._bury(worker)
        try:
            kind, content = pickle.loads(message)
        except Exception as error:  # a class that only the child can import, or one that does not unpickle
            kind, content = _BROKEN, (Outcome.LAUNCH_ERROR, _described(error))
        if kind == _BEGUN:
            worker.begun, worker.since = True, time.monotonic()  # starting was no work
            worker.deadline = worker.since + worker.task.seconds
            return []
        self.busy_seconds += time.monotonic() - worker.since
        ticket, worker.task = worker.task.ticket, None
        worker.jobs += 1
        if kind == _BROKEN:
            content = Failure(outcome=content[0], detail=content[1])
        if kind == _BROKEN or worker.jobs >= RECYCLE_AFTER:
            self._retire(worker)
        return [(ticket, content)]

    def _bury(self, worker: Worker) -> list[tuple[int, Any]]:
        """What a worker that closed its connection leaves: a crash, or a job for the next worker."""
        assert worker.task is not None
        task, how = worker.task, _death(worker)
        self._retire(worker)
        idle = worker.jobs and not worker.begun  # it died before it saw the job, which is not to blame
        if worker.process.returncode == -signal.SIGKILL and not idle:  # by a person, or a system short of memory
            task = task._replace(kills=task.kills + worker.begun, starts=task.starts + (not worker.begun))
            idle = task.kills < KILLS and task.starts < STARTS  # more is no accident
        if idle:
            self._queue.appendleft(task)
            return []
        return [(task.ticket, _failure_of_dead(worker, how))]

    def _start(self, place: int) -> Worker:
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        apart = self.apart[place] if place < len(self.apart) else {}
        # A session of its own: killing its group ends a compiler that it started, and Ctrl-C reaches only the parent.
        numbers = [str(theirs.fileno()), str(watched)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "autoattn.workers.worker_pool", *numbers, self.preload, str(self.niceness)],
                pass_fds=[theirs.fileno(), watched],
                env={**os.environ, **self.environment, **apart},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if os.environ.get("AUTOATTN_DEBUG") else subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            said = error.strerror or error
            raise HostError(f"a worker process must start, but {said}; free memory or processes") from error
        theirs.close()
        os.close(watched)
        worker = Worker(process=process, connection=Connection(ours.detach()), lifeline=lifeline, place=place)
        self.workers.append(worker)
        return worker

    def _retire(self, worker: Worker) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # nothing ends what is stuck in the driver
            worker.process.wait(EXIT_SECONDS)
        worker.connection.close()
        os.close(worker.lifeline)
        self.workers.remove(worker)


def next_results(*pools: Pool) -> list[tuple[Pool, int, Any]]:
    """Waits until a job of any of the pools ended; returns (pool, ticket, result or Failure) of all that did.

    Empty when they have nothing to do.
    """
    results: list[tuple[Pool, int, Any]] = []
    while not results:
        for pool in pools:
            pool._feed()
        busy = [worker for pool in pools for worker in pool._busy()]
        if not busy:
            return []
        patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        ready = set(wait([worker.connection for worker in busy], timeout=patience))
        results = [(pool, *result) for pool in pools for result in pool._gather(ready)]
    for pool in pools:
        pool._feed()
    return results


# What a worker says: (kind, content). A broken one may have poisoned the GPU and takes no other job.
_BEGUN, _RESULT, _BROKEN = "begun", "result", "broken"


def _death(worker: Worker) -> str:
    """How a worker that closed its connection ended, in words."""
    try:
        code = worker.process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return "the process hung when it should have ended"
    try:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:  # a real-time signal has no name
        how = f"signal {-code}"
    return f"the process died ({how})"


def _failure_of_dead(worker: Worker, how: str) -> Failure:
    """What became of the job of a worker that died: the job's crash, unless the machine is to blame."""
    if not worker.begun:  # it never saw the job
        detail = f"a worker process must start, but {how} before its first job; AUTOATTN_DEBUG=1 shows what it says"
        return Failure(outcome=Outcome.HOST_ERROR, detail=detail)
    killed = worker.process.returncode == -signal.SIGKILL
    if killed and host_faults.processes_killed_for_memory() > worker.memory_kills:
        fault = host_faults.killed("a worker")
        return Failure(outcome=fault.outcome, detail=fault.sentence)
    return Failure(outcome=Outcome.CRASH, detail=how)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def serve(connection: Connection, lifeline: int, preload: str, niceness: int) -> None:
    """The life of a worker: jobs until the parent goes away, or until one fails."""
    os.nice(niceness)
    for descriptor in (connection.fileno(), lifeline):  # Triton's ptxas inherits what may be, and would hold them open
        os.set_inheritable(descriptor, False)
    _end_with(lifeline)
    importlib.import_module(preload)
    memory: dict[Hashable, Any] = {}
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(pickle.dumps((_BEGUN, None)))
        try:
            message = pickle.dumps((_RESULT, pickle.loads(job).run(memory)))
        except Exception as error:
            failure = Failure.of(error, Outcome.LAUNCH_ERROR)  # a class of __main__ here: the parent has another
            connection.send_bytes(pickle.dumps((_BROKEN, (failure.outcome, failure.detail))))
            return
        connection.send_bytes(message)


def _end_with(lifeline: int) -> None:
    """Has this process and what it started killed once the parent's end of the lifeline is closed.

    The kernel itself sends the signal, to the whole group. A thread that waits needs the interpreter's lock to do that,
    and a job that hangs in C may hold it for ever. PR_SET_PDEATHSIG would spare the compiler that the worker runs, and
    strike when the thread ends that started the worker. The thread is for a parent that died before it was asked.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_end_after, args=[lifeline], daemon=True).start()


def _end_after(lifeline: int) -> None:
    hung_up = select.poll()
    hung_up.register(lifeline, select.POLLHUP)
    hung_up.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
