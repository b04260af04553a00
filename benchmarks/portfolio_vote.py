"""Grows the trees of a portfolio, which vote: each errs on other problems than the others, as each asks otherwise.

A tree that tells problems apart by few examples errs by chance where others would err elsewhere. Each split of each
tree chooses among features that are drawn for it, as in random forests (Breiman, Machine Learning 45, 2001).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Sequence

import portfolio_tree
from portfolio_tree import Example, Table

from autoattn.codegen.portfolio import Tree, Vote

TREES = 4
# What is asked above the trees: problems of other numbers have other feasible variants, so that a list for several
# numbers has one or two variants for each.
NUMBERS = (("ieee", 1.0), ("element_bytes", 4.0), ("tf32", 1.0))
FEW = 1000  # examples whose trees grow within the time that a process takes to begin


def grow(examples: Sequence[Example]) -> Tree:
    """Questions about the numbers of these problems, and trees that vote below them."""
    ordered = sorted(examples, key=lambda example: (example.problem.key, example.device.name))
    return _of_numbers(ordered, NUMBERS, portfolio_tree.LEAST_GAIN * len(ordered))


def _of_numbers(examples: Sequence[Example], questions: Sequence[tuple[str, float]], least_gain: float) -> Tree:
    """A tree for each answer to these questions, of which those that tell no two examples apart are not asked."""
    if not examples:
        return ()
    if not questions:
        return _voting(Table(examples, least_gain))
    (fact, below), *others = questions
    low = [example for example in examples if float(example.facts[fact]) < below]
    high = [example for example in examples if float(example.facts[fact]) >= below]
    if not low or not high:
        return _of_numbers(examples, others, least_gain)
    then, otherwise = (_of_numbers(half, others, least_gain) for half in (low, high))
    return portfolio_tree.question(fact, below, then, otherwise)


def _voting(table: Table) -> Tree:
    """Trees of the examples of a table, grown on all cores; a single one where all are alike."""
    cases = [(table, random.Random(seed)) for seed in range(TREES)]
    if len(table.able) < FEW:
        trees = list(itertools.starmap(portfolio_tree.grow, cases))
    else:
        with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
            trees = pool.starmap(portfolio_tree.grow, cases, chunksize=1)
    return trees[0] if all(tree == trees[0] for tree in trees) else Vote(trees=tuple(trees))
