"""Repairs of Triton's interpreter: each where a release has the fault, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, cast

import numpy
import pytest
import triton
from checkout_paths import python_path

from autoattn.kernels import interpreter

INDEX_FAILS = triton.__version__.startswith("3.6.") and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)
COMPARISON_FAILS = triton.__version__.startswith("3.9.0")
ALWAYS = "float8", "patches", "overflow", "shapes"  # of all releases that are known


def in_interpreter(script: str) -> object:
    """What a script prints as JSON in a process that interprets kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_repair_says_which_releases_need_it_and_why() -> None:
    assert tuple(repair.name for repair in interpreter.REPAIRS) == ("index", "comparison", *ALWAYS)
    assert all("Triton 3." in repair.releases and len(repair.reason) > 40 for repair in interpreter.REPAIRS)


def test_outside_of_an_interpreters_process_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise AssertionError("probed")

    probe = interpreter.Repair(name="x", releases="all", reason="none", is_needed=fail, apply=lambda: None)
    monkeypatch.setattr(interpreter, "REPAIRS", (probe,))
    assert not interpreter.interprets()
    assert interpreter.repair.__wrapped__() == ()


def test_a_repair_is_applied_just_where_its_release_has_the_fault() -> None:
    names = in_interpreter(
        "import json; from autoattn.kernels import interpreter; print(json.dumps(interpreter.repair()))"
    )
    assert names == ["index"] * INDEX_FAILS + ["comparison"] * COMPARISON_FAILS + list(ALWAYS)


PLANTED = """
import json
import numpy as np
from triton.runtime import interpreter as theirs
from autoattn.kernels import interpreter

{plant}
repairs = {{each.name: each for each in interpreter.REPAIRS}}
repair = repairs["{name}"]
before = repair.is_needed()
if before:
    repair.apply()
print(json.dumps([before, repair.is_needed()]))
"""
INDEX = """
patch = theirs._patch_lang_tensor
def only_arrays_without_axes(tensor, scope):
    patch(tensor, scope)
    def index(self):
        if self.handle.data.ndim:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        return int(self.handle.data)
    scope.set_attr(tensor, "__index__", index)
theirs._patch_lang_tensor = only_arrays_without_axes
"""
COMPARISON = """
store = theirs._interpreter.store
def only_booleans(addresses, values, mask):
    if mask.dtype != np.bool_:
        raise ValueError("mask has unsupported dtype")
    store(addresses, values, mask)
theirs._interpreter.store = only_booleans
compare = theirs.InterpreterBuilder.create_icmpEQ
theirs.InterpreterBuilder.create_icmpEQ = lambda self, lhs, rhs: theirs.TensorHandle(
    compare(self, lhs, rhs).data, lhs.dtype)
"""


@pytest.mark.parametrize(("name", "plant"), [("index", INDEX), ("comparison", COMPARISON)])
def test_a_planted_fault_is_seen_and_mended(name: str, plant: str) -> None:
    assert in_interpreter(PLANTED.format(name=name, plant=plant)) == [True, False]


KERNEL = """
import json
import torch
import triton
import triton.language as tl
import planted_interpreter
from autoattn.kernels import interpreter

interpreter.repair()
output = torch.zeros(4, 8)
planted_interpreter.rows_of_a_shared_tile[(1,)](output, 3, 2)
print(json.dumps(output.sum(1).tolist()))
"""


PATCHES = """
import json
import torch
import planted_interpreter
from triton.runtime import interpreter as theirs
from autoattn.kernels import interpreter

patched = []
patch = theirs._patch_builtin
theirs._patch_builtin = lambda package, builder, scope: patched.append(package) or patch(package, builder, scope)
counts = []
for repair in (False, True):
    if repair:
        interpreter.repair()
    for launch in range(3):
        patched.clear()
        output = torch.zeros(4, 8)
        planted_interpreter.rows_of_a_device_function[(3,)](output)
        counts.append(len(patched))
print(json.dumps([counts, output.sum(1).tolist()]))
"""


@pytest.mark.interpreter
def test_the_language_is_patched_once_in_a_launch_and_again_in_the_next() -> None:
    counts, sums = cast(Any, in_interpreter(PATCHES))
    assert sums == [8.0, 8.0, 8.0, 0.0]
    each, once = counts[1:3], counts[4:6]
    assert each[0] == each[1] > once[0] == once[1] > 0


OVERFLOW = """
import json
import torch
import planted_interpreter
from autoattn.kernels import interpreter

sums = []
for repair in (False, True):
    if repair:
        interpreter.repair()
    output = torch.zeros(1, dtype=torch.int32)
    planted_interpreter.sum_of_two[(1,)](output, 2 ** 31 - 1, 1)
    sums.append(output.item())
print(json.dumps(sums))
"""


@pytest.mark.interpreter
def test_an_overflow_is_told_neither_by_the_release_nor_by_its_repair() -> None:
    assert in_interpreter(OVERFLOW) == [-(2**31), -(2**31)]


SHAPES = """
import json
import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as theirs
from autoattn.kernels import interpreter

def facts(kind):
    value = tl.tensor(None, kind)
    shape = [size.value for size in value.shape]
    return [str(kind), kind.numel, shape, value.numel.value, str(value.dtype), str(theirs._get_np_dtype(kind))]

def described():
    pointers = tl.pointer_type(tl.float16)
    kinds = [tl.block_type(element, sizes) for element in (tl.int1, tl.bfloat16, pointers) for sizes in ([4], [4, 8])]
    return [facts(kind) for kind in kinds] + [[str(tl.tensor(None, kind).shape) for kind in (tl.int32, pointers)]]

def refusal(sizes):
    try:
        tl.block_type(tl.int32, sizes)
    except Exception as error:
        return type(error).__name__ + str(error)

def value(*sizes):
    kind = tl.block_type(tl.int32, [*sizes]) if sizes else tl.int32
    numbers = np.arange(np.prod(sizes, dtype=int), dtype=np.int32).reshape(sizes)
    return tl.tensor(theirs.TensorHandle(numbers, tl.int32), kind)

def broadcast(*operands):
    left, right = (value(*sizes) for sizes in operands)
    try:
        values = semantic.broadcast_impl_value(left, right)
    except ValueError as error:
        return str(error)
    return [[str(each.type), each.handle.data.tolist()] for each in values]

semantic = TritonSemantic(theirs.interpreter_builder)
wrong = [], [3], [2 ** 21], [2.0]
sizes = (), (2,), (4,), (2, 4), (2, 1), (1, 4)
pairs = [(left, right) for left in sizes for right in sizes]
before = described(), [refusal(sizes) for sizes in wrong], [broadcast(*pair) for pair in pairs]
interpreter.repair()
after = [described() for _ in range(2)][1], [refusal(sizes) for sizes in wrong], [broadcast(*pair) for pair in pairs]
one, other = (tl.tensor(None, tl.block_type(tl.float32, [tl.constexpr(4)])) for _ in range(2))
print(json.dumps([before == after, len(set(before[1])), one.shape is other.shape, one.type.shape is other.type.shape]))
"""


@pytest.mark.interpreter
def test_values_of_one_shape_share_it_and_are_what_they_were() -> None:
    assert in_interpreter(SHAPES) == [True, 4, True, True]


@pytest.mark.interpreter
def test_loops_between_values_and_stores_under_a_mask_of_a_scalar_run_on_this_release() -> None:
    assert in_interpreter(KERNEL) == [16.0, 16.0, 16.0, 0.0]


def test_an_exception_is_told_by_its_innermost_cause() -> None:
    inner = TypeError("only\n0-dimensional")
    outer = interpreter.InterpreterError(repr(inner))
    outer.__cause__ = inner
    outermost = interpreter.InterpreterError(repr(outer))
    outermost.__cause__ = outer
    assert interpreter.words(outermost) == "TypeError: only 0-dimensional"
    assert interpreter.words(interpreter.InterpreterError("alone")) == "InterpreterError: alone"
