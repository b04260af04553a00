"""The text of a portfolio's file: its variants by name, and the tree of questions that leads to lists of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import portfolio_tree
from portfolio_tree import Example

from autoattn.codegen import portfolio
from autoattn.codegen.portfolio import Question, Tree, Vote
from autoattn.core.problem import Op
from autoattn.core.variant import Variant

# What is left to the templates' seeds, which know such problems: beside a bias of pairs, or a score_mod that reads a
# tensor once a pair, in 16 bits and with many rows. Most first variants cannot run there, and the others of a list were
# measured to suit other problems.
LEFT_OUT = {"prompt_of_pairs": "(bias_of_pairs or reads_pairs) and element_bytes < 4 and shared_rows >= 80"}


def text_of(examples: Sequence[Example], tree: Tree) -> str:
    """The file of a portfolio that these examples gave."""
    sources = ", ".join(sorted({example.device.full_name for example in examples}))
    about = [
        "What calls run that nobody tuned: the first variant that can run, of the list that a problem's answers lead",
        "to, else the templates' seeds. Written by `python benchmarks/portfolios.py derive` from",
        f"{len(examples)} problems measured on {sources} and a model of their times.",
        "Not to be edited; docs/decisions/portfolios.md says how it is made.",
    ]
    (unit,) = {example.device.capabilities.matrix_unit.value for example in examples}
    # What suits cards with other products, nobody measured.
    (left_out,) = LEFT_OUT
    whole = Question(
        fact=unit, below=1.0, then=(), otherwise=Question(fact=left_out, below=1.0, then=tree, otherwise=())
    )
    names = _names({variant: None for variants in portfolio_tree.leaves(tree) for variant in variants})
    variants = {name: {"template": variant.template, "params": variant.as_dict()} for variant, name in names.items()}
    parts = [
        _lines("about", "[]", map(json.dumps, about)),
        f'  "version": {portfolio.VERSION}',
        f'  "operation": "{Op.FORWARD.value}"',
        _lines(
            "let", "{}", (f'"{name}": {json.dumps(text)}' for name, text in {**portfolio_tree.LET, **LEFT_OUT}.items())
        ),
        _lines("variants", "{}", (f'"{name}": {json.dumps(variant)}' for name, variant in variants.items())),
        f'  "tree": {_tree_text(whole, names, "  ")}',
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(name: str, brackets: str, items: Iterable[str]) -> str:
    """A list or a mapping with an item on each line."""
    return f'  "{name}": {brackets[0]}\n    ' + ",\n    ".join(items) + f"\n  {brackets[1]}"


def _tree_text(tree: Tree, names: Mapping[Variant, str], indent: str) -> str:
    """A question with its answers below it, trees that vote, one below the other, or names."""
    deeper = indent + " "
    if isinstance(tree, Vote):
        trees = (f"{deeper}{_tree_text(each, names, deeper)}" for each in tree.trees)
        return "[\n" + ",\n".join(trees) + f"\n{indent}]"
    if not isinstance(tree, Question):
        return json.dumps(" ".join(names[variant] for variant in tree))
    answers = [
        f'{deeper}"{word}": {_tree_text(answer, names, deeper)}'
        for word, answer in (("then", tree.then), ("else", tree.otherwise))
    ]
    condition = f'{{"if": "{tree.fact} < {tree.below:g}",'
    return "\n".join([condition, ",\n".join(answers) + "}"])


def _names(variants: Iterable[Variant]) -> dict[Variant, str]:
    """A name for each: its family, its tile, and a number."""
    names: dict[Variant, str] = {}
    count: Counter[str] = Counter()
    for variant in sorted(variants, key=lambda variant: (variant.template, str(variant))):
        params = variant.as_dict()
        stem = f"{variant.template.partition('/')[0]}_{params['BLOCK_M']}x{params['BLOCK_N']}"
        count[stem] += 1
        names[variant] = f"{stem}_{count[stem]}"
    return names
