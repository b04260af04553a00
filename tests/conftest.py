"""What all tests share: GPU tests are skipped where there is none, and fresh memory is poisoned."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from autoattn.codegen.portfolio import Portfolio
    from autoattn.core.problem import Op

# Small tensors gain nothing from threads, and threads of several test processes wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("autoattn", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("autoattn")


EACH = 4  # every run has each fourth case of costly tests


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_cases_to_exhaustive_runs(items)
    _skip_without_a_gpu(items)


def _leave_cases_to_exhaustive_runs(items: list[pytest.Item]) -> None:
    """Marks all but each EACH-th case of tests that are marked `interpreter` or `sampled`."""
    counts: Counter[tuple[Path, str]] = Counter()
    for item in items:
        heavy = item.get_closest_marker("interpreter") or item.get_closest_marker("sampled")
        left_out = item.get_closest_marker("exhaustive") or item.get_closest_marker("gpu")
        if not heavy or left_out or not isinstance(item, pytest.Function):
            continue
        test = item.path, item.originalname
        if counts[test] % EACH:
            item.add_marker(pytest.mark.exhaustive)
        counts[test] += 1


def _skip_without_a_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            # A test that is skipped asks for no fixture, so that one which is not there would show on a card alone.
            for name in set(item.fixturenames) - {"request"} - set(item._fixtureinfo.name2fixturedefs):
                raise pytest.UsageError(f"{item.nodeid} asks for the fixture {name}, and there is none; import it")
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch finds none"))


def pytest_collection_finish() -> None:
    """What was imported and collected lives to the end, so that no search for garbage need look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills what torch.empty and its kin return with NaN (the largest value of an integer type).

    A kernel that reads what nobody wrote, or leaves a part of its output unwritten, then gives a wrong answer instead
    of one that is right by luck.
    """
    import torch

    def poisoning(create: Any) -> Any:
        def created(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = create(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

        return created

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoning(getattr(torch.Tensor, name)))


@pytest.fixture(scope="session")
def child() -> Iterator[Any]:
    """A pool of one process in which Triton's interpreter runs kernels; it starts at its first job."""
    import interpreted

    with interpreted.pool() as pool:
        yield pool


@pytest.fixture
def zeros_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch of launches is empty, and what they are given lies in the host's memory."""
    import torch

    from autoattn.kernels import zeroed_scratch

    monkeypatch.setattr(zeroed_scratch, "new_zeros", lambda size, index: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr(
        zeroed_scratch, "new_zeros_on", lambda size, index, stream: zeroed_scratch.new_zeros(size, index)
    )
    monkeypatch.setattr(zeroed_scratch, "settle", lambda index: None)
    monkeypatch.setattr(zeroed_scratch, "slabs", {})
    for pool in zeroed_scratch.POOLS.values():
        monkeypatch.setattr(pool, "buffers", {})
        monkeypatch.setattr(pool, "short", set())


@pytest.fixture
def nothing_compiled_before(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Triton's cache is empty when tests begin, so that each kernel is compiled by them, and once."""
    here = tmp_path_factory.getbasetemp()
    whole_run = here.parent if "PYTEST_XDIST_WORKER" in os.environ else here
    monkeypatch.setenv("TRITON_CACHE_DIR", str(whole_run / "triton"))


@pytest.fixture
def no_portfolio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that nobody tuned run the templates' seeds: no measurement says otherwise."""
    from autoattn.codegen import portfolio

    monkeypatch.setattr(portfolio, "load", empty_portfolio)  # the shipped one stays read and judged


@lru_cache(maxsize=8)
def empty_portfolio(op: Op) -> Portfolio:
    """What `portfolio.load` gives where there is no file."""
    from autoattn.codegen import portfolio

    return portfolio.EMPTY


@pytest.fixture(scope="session")
def new_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders that no test has used, and that nobody makes before something is written there.

    `tmp_path_factory.mktemp` reads the names of all folders that it made, which takes milliseconds after thousands.
    """
    here = tmp_path_factory.mktemp("new_folders")
    return (here / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch, new_folders: Iterator[Path]) -> None:
    """Tests neither see nor touch the cache of whoever runs them."""
    monkeypatch.setenv("AUTOATTN_CACHE", str(next(new_folders)))
