"""Workers: whatever a job does to its process, the search gets an answer and nothing is left behind."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import planted_jobs
import pytest
from checkout_paths import python_path
from child_processes import alive, gone, noted
from planted_jobs import (
    Betray,
    Count,
    Deaf,
    Echo,
    Environment,
    Exit,
    Greedy,
    Hang,
    HangUp,
    Large,
    Niceness,
    Nothing,
    Parent,
    Raise,
    Refused,
    Sleep,
    Tally,
    Unpicklable,
)

from autoattn.core.trial import Outcome
from autoattn.search import trial_pipeline
from autoattn.workers import worker_pool
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.sampled

PATHS = python_path()
LONG = 60.0  # seconds that no job here takes, unless it hangs


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    """Makes pools whose workers import nothing slow, and closes them."""
    pools: list[Pool] = []

    def new_pool(size: int = 1, **environment: str) -> Pool:
        pools.append(Pool(size=size, environment={"PYTHONPATH": PATHS, **environment}, preload="planted_jobs"))
        return pools[-1]

    yield new_pool
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(make: Callable[..., Pool]) -> Pool:
    return make()


def all_results(pool: Pool, count: int) -> dict[int, Any]:
    by_ticket: dict[int, Any] = {}
    while len(by_ticket) < count:
        results = pool.next_results()
        assert results
        for ticket, result in results:
            assert ticket not in by_ticket
            by_ticket[ticket] = result
    return by_ticket


def worker_of(pool: Pool) -> int:
    pid, _ = pool.result(Echo(), LONG)
    assert alive(pid)
    return int(pid)


# Results


def test_a_job_gives_its_result_from_a_process_of_its_own(pool: Pool) -> None:
    pid, value = pool.result(Echo({"a": (1, None, b"x")}), LONG)
    assert value == {"a": (1, None, b"x")}
    assert pid != os.getpid()


def test_nothing_is_a_result_too(pool: Pool) -> None:
    assert pool.result(Nothing(), LONG) is None
    assert pool.result(Echo(1), LONG)[1] == 1


def test_a_failure_that_a_job_returns_keeps_its_worker(pool: Pool) -> None:
    failure = Failure(outcome=Outcome.COMPILE_ERROR, detail="words")
    pid, returned = pool.result(Echo(failure), LONG)
    assert returned == failure
    assert worker_of(pool) == pid


def test_a_worker_remembers_between_jobs(pool: Pool) -> None:
    assert [pool.result(Count(), LONG) for _ in range(3)] == [1, 2, 3]


def test_each_of_many_results_comes_under_the_key_of_its_job(make: Callable[..., Pool]) -> None:
    pool = make(2)
    results = dict(pool.results({name: Echo(name) for name in "abc"} | {"gone": Exit("abort")}, LONG))
    assert {name: results[name][1] for name in "abc"} == {"a": "a", "b": "b", "c": "c"}
    assert isinstance(results["gone"], Failure)
    assert list(pool.results({}, LONG)) == []


def test_a_large_result_and_a_large_job_arrive_whole(pool: Pool) -> None:
    assert pool.result(Large(50 * 2**20), LONG) == bytes(50 * 2**20)
    assert pool.result(Echo(b"x" * 2**22), LONG)[1] == b"x" * 2**22


def test_workers_see_the_environment_of_their_pool(make: Callable[..., Pool]) -> None:
    assert make(PLANTED="7").result(Environment("PLANTED"), LONG) == "7"


def test_every_ticket_gets_its_own_result_whatever_the_order(make: Callable[..., Pool]) -> None:
    pool = make(2)
    tickets = {pool.submit(Sleep(seconds), LONG): seconds for seconds in (0.3, 0.0, 0.05, 0.0, 0.1)}
    assert all_results(pool, 5) == tickets
    assert len(set(tickets)) == 5


def test_a_slow_job_holds_up_no_other(make: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make(2)
    pool.submit(Hang(tmp_path / "note"), LONG)
    others = [pool.submit(Echo(place), LONG) for place in range(5)]
    assert set(all_results(pool, 5)) == set(others)


def test_no_more_workers_are_started_than_the_pool_is_large(make: Callable[..., Pool]) -> None:
    pool = make(2)
    for _ in range(8):
        pool.submit(Echo(), LONG)
    assert len({pid for pid, _ in all_results(pool, 8).values()}) <= 2


def test_jobs_that_come_one_by_one_are_spread_over_the_workers(make: Callable[..., Pool]) -> None:
    pool = make(size=2)
    for place in (0, 1):
        pool.result(Echo("ready"), 30.0, place=place)
    for _ in range(6):
        pool.result(Echo("once more"), 30.0)
    assert [worker.jobs for worker in pool.workers] == [4, 4]


def test_an_idle_pool_has_no_results_and_starts_no_worker(pool: Pool) -> None:
    assert pool.next_results() == []
    assert pool.workers == []


def test_a_worker_is_replaced_after_so_many_jobs(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "RECYCLE_AFTER", 2)
    assert [pool.result(Count(), LONG) for _ in range(4)] == [1, 2, 1, 2]


def test_workers_stand_behind_others_as_far_as_they_are_told_to() -> None:
    here = os.nice(0)
    with Pool(size=1, environment={"PYTHONPATH": PATHS}, preload="planted_jobs", niceness=5) as pool:
        assert pool.result(Niceness(), LONG) == here + 5
        busy = pool.busy_seconds
        assert 0.0 < busy < LONG
        pool.result(Niceness(), LONG)
        assert pool.busy_seconds > busy


def test_the_workers_of_the_search_know_its_jobs() -> None:
    for module in (trial_pipeline.COMPILER_MODULE, trial_pipeline.GPU_MODULE):
        assert importlib.util.find_spec(module) is not None
    environment = {"PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": ""}
    with Pool(size=1, environment=environment, preload=trial_pipeline.GPU_MODULE) as pool:
        assert pool.result(Raise("x"), LONG).detail == "PlantedError: x"


# Failures: each costs its job, and the next one runs on a fresh worker


FAILURES = {
    "exception": (Raise("it\nbroke " + "x" * 1000), Outcome.LAUNCH_ERROR, "PlantedError: it broke xxx"),
    "unpicklable result": (Unpicklable(), Outcome.LAUNCH_ERROR, "Unpicklable.run"),
    "unreadable result": (Betray(), Outcome.LAUNCH_ERROR, "PlantedError: no way back"),
    "unreadable job": (Deaf(os.getpid()), Outcome.LAUNCH_ERROR, "PlantedError: only at home"),
    "out of memory": (Greedy(), Outcome.OUT_OF_MEMORY, "there must be memory for a compile"),
    "full disk": (Refused(errno.ENOSPC), Outcome.DISK_FULL, "there must be room on the disk of Triton's cache"),
    "read-only place": (Refused(errno.EROFS, "/etc/x"), Outcome.READ_ONLY, "/etc/x must be writable, but Read-only"),
    "too many files": (Refused(errno.EMFILE), Outcome.HOST_ERROR, "but Too many open files"),
    "abort": (Exit("abort"), Outcome.CRASH, "the process died (SIGABRT)"),
    "kill": (Exit("kill"), Outcome.CRASH, "the process died (SIGKILL)"),
    "segfault": (Exit("segfault"), Outcome.CRASH, "the process died (SIGSEGV)"),
    "real-time signal": (Exit("real-time"), Outcome.CRASH, f"the process died (signal {signal.SIGRTMIN + 3})"),
    "_exit": (Exit("_exit"), Outcome.CRASH, "the process died (exit code 3)"),
    "exit": (Exit("exit"), Outcome.CRASH, "the process died (exit code 4)"),
    "quiet exit": (Exit("zero"), Outcome.CRASH, "the process died (exit code 0)"),
}


@pytest.mark.parametrize(("job", "outcome", "words"), FAILURES.values(), ids=FAILURES)
def test_a_failed_job_costs_itself_and_nothing_else(pool: Pool, job: Any, outcome: Outcome, words: str) -> None:
    assert pool.result(Count(), LONG) == 1
    first, second, third = pool.submit(job, LONG), pool.submit(Count(), LONG), pool.submit(Count(), LONG)
    results = all_results(pool, 3)
    failure = results[first]
    assert isinstance(failure, Failure)
    assert failure.outcome is outcome
    assert words in failure.detail
    assert len(failure.detail) < 400
    assert "\n" not in failure.detail
    assert (results[second], results[third]) == (1, 2)  # a fresh worker, which lives on


def test_a_hang_is_ended_with_all_that_it_started(pool: Pool, tmp_path: Path) -> None:
    worker_of(pool)  # the time of a job does not hold for the start of a worker
    first, second = pool.submit(Hang(tmp_path / "note", child=True, stubborn=True), 1.5), pool.submit(Count(), LONG)
    results = all_results(pool, 2)
    assert results[first].outcome is Outcome.TIMEOUT
    assert "no answer within" in results[first].detail
    assert results[second] == 1
    pids = noted(tmp_path / "note")
    assert len(pids) == 2
    assert gone(*pids)


def test_the_time_of_a_job_begins_when_its_worker_is_ready(make: Callable[..., Pool], tmp_path: Path) -> None:
    slow_start = tmp_path / "sitecustomize.py"
    slow_start.write_text("import time\ntime.sleep(1.5)\n")
    pool = make(PYTHONPATH=f"{tmp_path}{os.pathsep}{PATHS}")
    assert pool.result(Echo(1), 1.2)[1] == 1


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_what_a_dying_worker_started_is_ended_with_it(pool: Pool, tmp_path: Path, end: str) -> None:
    assert pool.result(Parent(tmp_path / "note", Exit(end)), LONG).outcome is Outcome.CRASH
    assert gone(*noted(tmp_path / "note"))


def test_what_a_failed_job_started_is_ended_with_it(pool: Pool, tmp_path: Path) -> None:
    assert pool.result(Parent(tmp_path / "note", Raise("x")), LONG).outcome is Outcome.LAUNCH_ERROR
    assert gone(*noted(tmp_path / "note"))


@pytest.mark.parametrize("begun", [True, False])
def test_a_job_whose_worker_somebody_killed_runs_again(pool: Pool, tmp_path: Path, begun: bool) -> None:
    if begun:
        assert pool.result(Tally(tmp_path / "tally", Exit("kill")), LONG) == 2
        return
    killed: set[int] = set()

    def kill() -> None:
        """Kills the first four workers while they start."""
        while len(killed) < 4:
            for worker in list(pool.workers):
                if worker.process.pid not in killed:
                    killed.add(worker.process.pid)
                    os.kill(worker.process.pid, signal.SIGKILL)
            time.sleep(0.001)

    killer = threading.Thread(target=kill)
    killer.start()
    assert pool.result(Echo(1), LONG)[1] == 1
    killer.join()


@pytest.mark.parametrize(("end", "times"), [("kill", worker_pool.KILLS), ("segfault", 1), ("abort", 1)])
def test_a_job_that_kills_its_workers_is_given_three_and_one_that_crashes_one(
    pool: Pool, tmp_path: Path, end: str, times: int
) -> None:
    tally = tmp_path / "tally"
    failure = pool.result(Tally(tally, Exit(end), bad=9), LONG)
    assert failure.outcome is Outcome.CRASH
    assert len(tally.read_text()) == times


def test_a_worker_that_hangs_up_and_stays_is_ended(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "EXIT_SECONDS", 0.2)
    pid = worker_of(pool)
    failure = pool.result(HangUp(), LONG)
    assert failure.outcome is Outcome.CRASH
    assert failure.detail == "the process hung when it should have ended"
    assert gone(pid)


def test_a_worker_that_dies_between_jobs_is_replaced(pool: Pool) -> None:
    pid = worker_of(pool)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert worker_of(pool) != pid


def test_a_job_that_a_dying_worker_never_began_is_begun_by_another(pool: Pool) -> None:
    pid = worker_of(pool)
    os.kill(pid, signal.SIGSTOP)
    ticket = pool.submit(Echo(1), LONG)  # taken by the connection, read by nobody
    os.kill(pid, signal.SIGKILL)
    (other, value) = all_results(pool, 1)[ticket]
    assert other != pid
    assert value == 1


def test_a_large_job_for_a_worker_that_cannot_start_is_no_endless_loop(make: Callable[..., Pool]) -> None:
    pool = make()
    pool.preload = "no_such_module"
    assert pool.result(Echo(b"x" * 2**24), LONG).outcome is Outcome.HOST_ERROR


def test_a_worker_that_cannot_start_says_how_to_learn_why(make: Callable[..., Pool]) -> None:
    pool = make()
    pool.preload = "no_such_module"
    failure = pool.result(Echo(), LONG)
    assert failure.outcome is Outcome.HOST_ERROR
    assert failure.detail == (
        "a worker process must start, but the process died (exit code 1) before its first job; AUTOATTN_DEBUG=1 shows "
        "what it says"
    )


def test_a_job_that_cannot_be_sent_is_the_callers_mistake_and_harms_nobody(pool: Pool) -> None:
    with pytest.raises((AttributeError, TypeError)):
        pool.submit(Echo(lambda: None), LONG)
    assert pool.next_results() == []
    assert pool.result(Echo(1), LONG)[1] == 1


# Places


def test_each_place_has_its_environment_also_when_its_worker_is_replaced(make: Callable[..., Pool]) -> None:
    pool = make(2)
    pool.apart = ({"PLANTED": "left"}, {"PLANTED": "right"})
    for _ in range(2):
        tickets = {pool.submit(Environment("PLANTED"), LONG, place=place): place for place in (1, 0, 1, 1)}
        by_ticket = all_results(pool, 4)
        assert {by_ticket[ticket] for ticket, place in tickets.items() if place == 0} == {"left"}
        assert {by_ticket[ticket] for ticket, place in tickets.items() if place == 1} == {"right"}
        assert pool.result(Exit("segfault"), LONG, place=1).outcome is Outcome.CRASH


def test_a_job_for_a_place_waits_for_it_and_holds_up_no_other(make: Callable[..., Pool]) -> None:
    pool = make(2)
    slow = pool.submit(Sleep(1.0), LONG, place=0)
    late, quick = pool.submit(Echo(), LONG, place=0), [pool.submit(Echo(), LONG) for _ in range(3)]
    order = []
    while len(order) < 5:
        order += [ticket for ticket, _ in pool.next_results()]
    assert order[:3] == quick
    assert set(order[3:]) == {slow, late}


def test_results_of_several_pools_are_awaited_at_once(make: Callable[..., Pool]) -> None:
    slow, quick = make(), make()
    worker_of(slow)
    worker_of(quick)
    first, second = slow.submit(Sleep(1.0), LONG), quick.submit(Echo(1), LONG)
    ((pool, ticket, _),) = worker_pool.next_results(slow, quick)
    assert (pool, ticket) == (quick, second)
    assert worker_pool.next_results(slow, quick) == [(slow, first, 1.0)]
    assert worker_pool.next_results(slow, quick) == []


# Ends


def test_close_leaves_no_process_behind(make: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make(2)
    pool.submit(Hang(tmp_path / "note", child=True), LONG)
    idle = {pid for pid, _ in [pool.result(Echo(), LONG)]}
    pids = [*noted(tmp_path / "note"), *idle]
    pool.submit(Sleep(LONG), LONG)
    pool.submit(Sleep(LONG), LONG)  # queued, never begun
    pool.close()
    assert not any(map(alive, pids[:1]))  # waited for
    assert gone(*pids)
    assert pool.next_results() == []
    pool.close()


def test_leaving_a_pool_closes_it_whatever_happened(make: Callable[..., Pool]) -> None:
    pids = []

    def interrupted() -> None:
        with make() as pool:
            pids.append(worker_of(pool))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(map(alive, pids))


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import planted_jobs
from autoattn.workers.worker_pool import Pool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background inherits it ignored
pool = Pool(size=2, environment={}, preload="planted_jobs")
note = Path(sys.argv[1])
pool.submit(planted_jobs.Hang(note / "busy", child=True, locked=len(sys.argv) > 2), 600)
pid, _ = pool.result(planted_jobs.Echo(), 600)
planted_jobs.write(note / "idle", pid)
try:
    pool.next_results()
except KeyboardInterrupt:
    pid, _ = pool.result(planted_jobs.Echo(), 600)
    planted_jobs.write(note / "after", pid)
    sys.exit(7)
"""


@pytest.fixture
def tuner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process with an idle worker, and a busy one that has a child."""
    locked = ["locked"] if getattr(request, "param", False) else []
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), *locked],
        env={**os.environ, "PYTHONPATH": PATHS},
        start_new_session=True,
    )
    noted(tmp_path / "busy")
    noted(tmp_path / "idle")
    yield process
    process.kill()
    process.wait()


def test_ctrl_c_reaches_the_parent_alone(tuner: subprocess.Popen[bytes], tmp_path: Path) -> None:
    os.killpg(tuner.pid, signal.SIGINT)  # as a terminal sends it: to the whole group
    assert tuner.wait(60) == 7
    assert noted(tmp_path / "after") == noted(tmp_path / "idle")  # the same worker answered


@pytest.mark.parametrize("tuner", [False, True], indirect=True, ids=["asleep", "with the interpreter's lock"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent_however_it_ends(
    tuner: subprocess.Popen[bytes], tmp_path: Path, how: signal.Signals
) -> None:
    pids = noted(tmp_path / "busy") + noted(tmp_path / "idle")
    assert all(map(alive, pids))
    tuner.send_signal(how)
    assert tuner.wait() == -how
    assert gone(*pids)


def test_workers_run_in_sessions_of_their_own(pool: Pool) -> None:
    pid = worker_of(pool)
    assert os.getsid(pid) == os.getpgid(pid) == pid


def test_planted_jobs_import_nothing_slow() -> None:
    """The workers of these tests start in a moment only as long as this holds."""
    assert planted_jobs.__file__ is not None
    script = "import planted_jobs, autoattn.workers.worker_pool, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, env={**os.environ, "PYTHONPATH": PATHS})
    assert run.stdout == b"False\n"
