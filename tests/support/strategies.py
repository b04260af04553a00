"""Hypothesis strategies of problems, variants and whole calls, over the sampler of `drawn`; they shrink as it draws."""

from __future__ import annotations

from drawn import LARGE, TINY, Drawn, call_of, drawn, params_of
from hypothesis import strategies as st

from autoattn.core.problem import Problem
from autoattn.core.variant import Value

_RANDOMS = st.randoms(use_true_random=False)


def problems(*, tiny: bool = True) -> st.SearchStrategy[Problem]:
    """Problems of every kind; tiny ones take the interpreter a tenth of a second."""
    return _RANDOMS.map(lambda rng: call_of(rng, TINY if tiny else LARGE).problem)


def variants(problem: Problem) -> st.SearchStrategy[dict[str, Value]]:
    """Parameters that change the structure of a kernel for `problem`, with small tiles."""
    return _RANDOMS.map(lambda rng: params_of(rng, problem))


def calls() -> st.SearchStrategy[Drawn]:
    """Tiny calls with a kernel for each."""
    return _RANDOMS.map(drawn)
