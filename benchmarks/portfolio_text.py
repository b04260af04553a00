"""The text of a portfolio's file: its variants by name, and the network that estimates what each costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from portfolio_examples import Example

from autoattn.codegen import portfolio
from autoattn.codegen.cost_network import CostNetwork
from autoattn.codegen.portfolio import Portfolio
from autoattn.core.problem import Op
from autoattn.core.variant import Variant


def text_of(examples: Sequence[Example], derived: Portfolio) -> str:
    """The file of a portfolio that these measured examples gave."""
    sources = ", ".join(sorted({example.device.full_name for example in examples}))
    about = [
        "What calls run that nobody tuned: the variant that can run of which a small network expects the least time,",
        "else the templates' seeds. Written by `python benchmarks/portfolios.py derive` from",
        f"{len(examples)} problems measured on {sources} and a model of their times.",
        "Not to be edited; docs/decisions/portfolios.md says how it is made.",
    ]
    names = _names(derived.variants)
    variants = (
        f'"{name}": {json.dumps({"template": variant.template, "params": variant.as_dict()})}'
        for name, variant in zip(names, derived.variants, strict=True)
    )
    let = (f'"{name}": {json.dumps(rule.text)}' for name, rule in derived.let.items())
    parts = [
        f'"about": {_lines("[]", map(json.dumps, about))}',
        f'"version": {portfolio.VERSION}',
        f'"operation": "{Op.FORWARD.value}"',
        f'"let": {_lines("{}", let)}',
        f'"left_out": {json.dumps(derived.left_out.text)}',
        f'"variants": {_lines("{}", variants)}',
        f'"network": {_network_text(derived.network)}',
    ]
    return _lines("{}", parts, indent="") + "\n"


def _lines(brackets: str, items: Iterable[str], indent: str = "  ") -> str:
    """A list or a mapping with an item on each line."""
    return f"{brackets[0]}\n{indent}  " + f",\n{indent}  ".join(items) + f"\n{indent}{brackets[1]}"


def _network_text(network: CostNetwork) -> str:
    """The ranges of its inputs, and the layers, each row on a line."""
    ranges = (
        f'"{name}": [{low:.12g}, {high:.12g}]' for name, (low, high) in zip(network.inputs, network.ranges, strict=True)
    )
    layers = [
        _lines("[]", ("[" + ", ".join(f"{weight:.12g}" for weight in row) + "]" for row in layer), indent=" " * 6)
        for layer in network.layers
    ]
    inputs, weights = _lines("{}", ranges, indent=" " * 4), _lines("[]", layers, indent=" " * 4)
    return _lines("{}", [f'"inputs": {inputs}', f'"layers": {weights}'])


def _names(variants: Iterable[Variant]) -> Iterator[str]:
    """A name for each: its family, its tile, and a number."""
    count: Counter[str] = Counter()
    for variant in variants:
        params = variant.as_dict()
        stem = f"{variant.template.partition('/')[0]}_{params['BLOCK_M']}x{params['BLOCK_N']}"
        count[stem] += 1
        yield f"{stem}_{count[stem]}"
