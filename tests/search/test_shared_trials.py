"""Ledgers: what several processes know of one study, in each kind of storage, and what a dead one leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from checkout_paths import INSTALLED, SUPPORT
from optuna.trial import TrialState
from rarely import rarely
from samples import A30, prediction, problem
from servers import grpc_url, mysql_server, postgres_server  # noqa: F401
from study_trials import SPACE as WHOLE
from study_trials import failed, trial, variant

from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.errors import AutoattnError
from autoattn.search import shared_trials, storage
from autoattn.search.shared_trials import Ledger, News, Owner
from autoattn.search.storage import Storage
from autoattn.search.study import BAD, Study

pytestmark = pytest.mark.sampled

HERE = Path(__file__).parent
SPACE = replace(WHOLE, choices={**WHOLE.choices, "c": ("w", "x")})  # of which 30 points are feasible
KINDS = ("journal", "sqlite", "postgresql", "mysql", "grpc")
FIRST, SECOND = variant(2, 2), variant(4, 4)

Open = Callable[..., Ledger]


@pytest.fixture(
    params=rarely(KINDS, lambda kind: kind in ("journal", "postgresql"))
)  # servers stand for what locks and relays
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where trials are kept: the path of a journal, or a URL."""
    if request.param == "journal":
        return str(tmp_path / "study.journal")
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'trials.db'}"
    if request.param == "grpc":
        return str(request.getfixturevalue("grpc_url"))
    server = {"postgresql": "postgres_server", "mysql": "mysql_server"}[request.param]
    return str(request.getfixturevalue(server).database())


def kept(place: str) -> Storage:
    return storage.server(place) if "://" in place else storage.journal(Path(place))


@pytest.fixture
def open_ledger(place: str) -> Iterator[Open]:
    """Opens the study as another process would: through a connection of its own."""
    opened: list[Ledger] = []
    name = f"study {uuid.uuid4()}"

    def connect(name: str = name) -> Ledger:
        opened.append(Ledger(name, kept(place), SPACE))
        return opened[-1]

    yield connect
    for ledger in opened:
        ledger.leave()


def proposal(study: Study) -> Variant | None:
    """As a tuner asks for one, which hears how much of its budget others took."""
    study.hear()
    return study.propose()


def proposed(study: Study, count: int) -> list[Variant]:
    proposals = [proposal(study) for _ in range(count)]
    assert None not in proposals
    return [variant for variant in proposals if variant is not None]


def studied(ledger: Ledger, **changes: Any) -> Study:
    return Study(ledger, SPACE, problem(), A30, **{"seed": 0, "budget": 24, **changes})


# What several processes know


def test_what_one_tries_no_other_tries_and_what_it_finished_all_know(open_ledger: Open) -> None:
    first, second = open_ledger(), open_ledger()
    assert first.claim(FIRST)
    assert not second.claim(FIRST)
    assert second.claim(SECOND)
    first.finish(trial(FIRST), 1.0)
    second.finish(failed(SECOND), 2.0)
    assert first.news().finished == [failed(SECOND)]
    assert second.news().finished == [trial(FIRST)]
    assert not first.claim(SECOND)
    assert not second.claim(FIRST)
    assert first.news() == second.news() == shared_trials.News(finished=[], freed=[])
    assert open_ledger().news().finished == [trial(FIRST), failed(SECOND)]


def test_a_claim_that_is_given_up_is_free_for_others_who_hear_of_it(open_ledger: Open) -> None:
    first, second = open_ledger(), open_ledger()
    assert first.claim(FIRST)
    second.news()
    assert list(second.claimed) == [FIRST]
    first.leave()
    assert second.news().freed == [FIRST]
    assert second.claimed == {}
    assert second.claim(FIRST)


def test_studies_of_two_names_know_nothing_of_each_other(open_ledger: Open) -> None:
    first, second = open_ledger("one"), open_ledger("two")
    assert first.claim(FIRST)
    assert second.claim(FIRST)
    first.finish(trial(FIRST), 1.0)
    assert second.news().finished == []


def test_of_claims_at_one_time_one_holds(open_ledger: Open) -> None:
    """Each of 4 processes claims the same 12 variants: all at once, and each has them in another order."""
    variants = list(SPACE.feasible(problem(), A30))[:12]
    ledgers = [open_ledger() for _ in range(4)]
    won: dict[int, list[Variant]] = {}
    start = threading.Barrier(len(ledgers))

    def compete(number: int) -> None:
        start.wait()
        order = variants[number:] + variants[:number] if number % 2 else variants
        won[number] = [variant for variant in order if ledgers[number].claim(variant)]

    threads = [threading.Thread(target=compete, args=[number]) for number in range(len(ledgers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claimed = [variant for variants in won.values() for variant in variants]
    assert len(claimed) == len(set(claimed)), "two hold one variant"
    assert set(claimed) == set(variants), "nobody holds a variant"


def test_two_studies_try_every_variant_once_and_both_know_all_in_the_end(open_ledger: Open) -> None:
    first, second = studied(open_ledger(), budget=30), studied(open_ledger(), budget=30)
    tried = []
    while True:
        pair = [(study, proposal(study)) for study in (first, second)]
        tried += [point for _, point in pair if point is not None]
        for study, point in pair:
            if point is not None:
                study.record(trial(point))
        if all(point is None for _, point in pair):
            break
    assert len(tried) == len(set(tried)) == 30
    assert first.trials == second.trials
    assert {first.taken, second.taken} == {30}


def test_what_another_process_measured_informs_the_sampler_and_counts(open_ledger: Open) -> None:
    first, second = studied(open_ledger()), studied(open_ledger())
    flying = proposed(first, 3)
    second.hear()
    assert (second.elsewhere, second.taken) == (3, 3)
    assert not set(proposed(second, 10)) & set(flying)
    for point in flying:
        first.record(trial(point))
    second.hear()
    assert (second.elsewhere, second.taken, len(second.trials)) == (0, 13, 3)
    optuna_trials = second.optuna_study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    assert [trial.params for trial in optuna_trials if trial.value < BAD] == [variant.as_dict() for variant in flying]


def test_who_loses_the_last_variant_to_another_process_takes_no_other(
    open_ledger: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studied(open_ledger())
    claims: list[Variant] = []

    def lost(variant: Variant) -> bool:
        claims.append(variant)
        return len(claims) > 1

    assert study.ledger is not None
    monkeypatch.setattr(study.ledger, "claim", lost)
    assert study.propose(lambda: False) is None
    assert len(claims) == 1
    assert study.propose(lambda: True) is not None


def test_what_another_process_gave_up_is_tried_next(open_ledger: Open) -> None:
    first, second = studied(open_ledger(), budget=30), studied(open_ledger(), budget=30)
    flying = proposed(first, 2)
    rest = proposed(second, 28)
    assert proposal(second) is None
    first.close()
    assert set(proposed(second, 2)) == set(flying)
    assert proposal(second) is None
    assert len(rest) == 28


# What a dead process leaves


CLAIMER = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[4:]
import test_shared_trials
from autoattn.search.shared_trials import Ledger, News, Owner
one = Ledger(sys.argv[2], test_shared_trials.kept(sys.argv[1]), test_shared_trials.SPACE)
assert one.claim(test_shared_trials.SECOND)
one.finish(test_shared_trials.trial(test_shared_trials.SECOND), 1.0)
assert one.claim(test_shared_trials.FIRST)
Path(sys.argv[3]).write_text("ready")
time.sleep(600)
"""


@pytest.fixture
def claimer(place: str, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(the study's name, a process that tries one variant of it and has finished another)"""
    name, note = f"study {uuid.uuid4()}", tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIMER, place, name, str(note), str(HERE), str(SUPPORT), str(INSTALLED)],
    )
    for _ in range(1200):
        if note.exists():
            break
        assert process.poll() is None
        time.sleep(0.1)
    yield name, process
    process.kill()
    process.wait()


def test_a_killed_process_loses_what_it_was_trying_and_nothing_else(
    open_ledger: Open, claimer: tuple[str, subprocess.Popen[bytes]]
) -> None:
    name, process = claimer
    alive = open_ledger(name)
    assert alive.news().finished == [trial(SECOND)]
    assert list(alive.claimed) == [FIRST]
    assert not alive.claim(FIRST)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert alive.news() == shared_trials.News(finished=[], freed=[FIRST])
    assert alive.claim(FIRST)
    fresh = open_ledger(name)
    assert fresh.news().finished == [trial(SECOND)]
    assert list(fresh.claimed) == [FIRST], "by the one that is alive"


def test_a_killed_process_that_nobody_buried_is_dead(
    open_ledger: Open, claimer: tuple[str, subprocess.Popen[bytes]]
) -> None:
    name, process = claimer
    alive = open_ledger(name)
    os.kill(process.pid, signal.SIGKILL)
    for _ in range(500):  # it stays a zombie as long as nobody waits for it
        if alive.claim(FIRST):
            return
        time.sleep(0.01)
    pytest.fail("the claim of a zombie holds")


def test_a_process_number_that_came_again_is_another_process(open_ledger: Open) -> None:
    first, second = open_ledger(), open_ledger()
    owner = Owner.parse(first.owner)
    first.owner = str(Owner(machine=owner.machine, process=owner.process, begun="1", unique="x"))
    assert first.claim(FIRST)
    assert second.claim(FIRST)


@pytest.fixture
def elsewhere(open_ledger: Open, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger of another machine, whose processes nobody here can see."""
    monkeypatch.setattr(shared_trials, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(shared_trials, "SILENCE_SECONDS", 0.8)
    ledger = open_ledger()
    owner = Owner.parse(ledger.owner)
    ledger.owner = str(Owner(machine="another", process=owner.process, begun=owner.begun, unique="x"))
    return ledger


def watched(ledger: Ledger, seconds: float) -> bool:
    """Whether the claim on FIRST held that long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ledger.news()
        if FIRST not in ledger.claimed:
            return False
        time.sleep(0.05)
    return True


def test_a_machine_that_gives_signs_of_life_keeps_its_claims(elsewhere: Ledger, open_ledger: Open) -> None:
    assert elsewhere.claim(FIRST)
    assert watched(open_ledger(), 2.5)


def test_a_machine_that_falls_silent_loses_its_claims(elsewhere: Ledger, open_ledger: Open) -> None:
    assert elsewhere.claim(FIRST)
    ledger = open_ledger()
    assert watched(ledger, 0.5)
    elsewhere.gone.set()  # as after kill -9, or when its cable is pulled
    assert not watched(ledger, 10.0)
    assert ledger.claim(FIRST)


def test_what_a_process_finished_after_it_was_taken_for_dead_is_kept(elsewhere: Ledger, open_ledger: Open) -> None:
    assert elsewhere.claim(FIRST)
    elsewhere.gone.set()
    ledger = open_ledger()
    assert not watched(ledger, 10.0)
    elsewhere.finish(trial(FIRST), 1.0)
    assert ledger.news().finished == [trial(FIRST)]
    assert open_ledger().news().finished == [trial(FIRST)]


def test_what_has_an_outcome_is_finished_also_when_its_process_died_before_it_said_so(
    open_ledger: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_ledger()
    assert first.claim(FIRST)

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(first.storage, "set_trial_state_values", killed)
        with pytest.raises(SystemExit):
            first.finish(trial(FIRST), 1.0)
    second = open_ledger()
    assert second.news().finished == [trial(FIRST)]
    assert not second.claim(FIRST)


def test_every_outcome_and_report_comes_back_as_it_was(open_ledger: Open) -> None:
    first = open_ledger()
    of_variants = [outcome for outcome in Outcome if not outcome.of_environment]
    pairs = zip(SPACE.feasible(problem(), A30), of_variants, strict=False)
    trials = [Trial(variant=variant, outcome=outcome, detail=f'{outcome.value} é\n"') for variant, outcome in pairs]
    trials.append(Trial(variant=variant(6, 4), outcome=Outcome.OK, digest="d" * 16, prediction=prediction(1 / 3)))
    for finished_trial in trials:
        assert first.claim(finished_trial.variant)
        first.finish(finished_trial, 1.0)
    assert open_ledger().news().finished == trials


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome.of_environment])
def test_what_the_machine_is_to_blame_for_is_never_written(tmp_path: Path, outcome: Outcome) -> None:
    first = Ledger("one", storage.journal(tmp_path / "one.journal"), SPACE)
    assert first.claim(FIRST)
    with pytest.raises(ValueError, match="says nothing of its variant"):
        first.finish(replace(trial(FIRST), outcome=outcome, detail="no"), 1.0)
    first.give_up(FIRST)
    second = Ledger("one", storage.journal(tmp_path / "one.journal"), SPACE)
    assert second.news() == News(finished=[], freed=[])
    assert second.claim(FIRST), "whoever comes next tries it"


@pytest.mark.parametrize(
    ("outcome", "detail", "blamed"),
    [
        (Outcome.LAUNCH_ERROR, "PermissionError: [Errno 13] Permission denied: '/root/.cache'", False),
        (Outcome.COMPILE_ERROR, "Triton 3.6.0 cannot compile this: [Errno 28] No space left on device", False),
        (Outcome.COMPILE_ERROR, "Triton 3.6.0 cannot compile this: ptxas said no", True),
        (Outcome.WRONG_RESULT, "error 1 where 0.1 is allowed", True),
    ],
)
def test_failures_of_the_machine_that_an_older_version_wrote_are_tried_anew(
    tmp_path: Path, outcome: Outcome, detail: str, blamed: bool
) -> None:
    first = Ledger("one", storage.journal(tmp_path / "one.journal"), SPACE)
    assert first.claim(FIRST)
    written = replace(trial(FIRST), outcome=outcome, detail=detail)
    first.finish(written, 1.0)
    second = Ledger("one", storage.journal(tmp_path / "one.journal"), SPACE)
    assert second.news().finished == [written] * blamed
    assert second.claim(FIRST) is not blamed


# A journal's own


def test_a_line_that_a_killed_process_left_half_written_harms_nobody_who_goes_on(tmp_path: Path) -> None:
    journal = tmp_path / "one.journal"
    first, second = (Ledger("one", storage.journal(journal), SPACE) for _ in range(2))
    assert first.claim(FIRST)
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"half')
    first.finish(trial(FIRST), 1.0)
    assert second.news().finished == [trial(FIRST)]
    assert Ledger("one", storage.journal(journal), SPACE).news().finished == [trial(FIRST)]


def test_a_trial_of_another_space_is_refused_in_a_sentence(open_ledger: Open) -> None:
    name = f"study {uuid.uuid4()}"  # a proxy's storage holds those of other tests too
    first = open_ledger(name)
    first.finish(trial(FIRST), 1.0)
    whole = optuna.load_study(study_name=name, storage=first.storage)
    (other,) = whole.get_trials()
    other.user_attrs["trial"]["variant"]["params"][0] = ["a", 99]
    whole.add_trial(other)
    with pytest.raises(AutoattnError) as caught:
        open_ledger(name).news()
    assert "\n" not in str(caught.value)
