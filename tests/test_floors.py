"""Imports run downward only, and each dependency has its doors: read from the source, lazy imports included."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "autoattn"

FLOORS = (
    {
        "errors",
        "mask",
        "problem",
        "variant",
        "trial",
        "entry",
        "device",
        "profiles",
        "arithmetic",
        "rounds",
        "published",
        "quality",
    },
    {
        *("resources", "shapes", "space", "render", "cache", "cachefile", "inventory", "recording", "raw", "encodings"),
        *(
            "availability",
            "expression",
            "precedence",
            "tangent",
            "triton_release",
            "shapes_text",
            "model_config",
            "environment",
        ),
    },
    {
        "reference",
        "assembler",
        "compile",
        "interpreter",
        "bound",
        "loops",
        "sass",
        "ops",
        "validate",
        "zeros",
        "measure",
        "model",
        "waves",
        "program",
        "calibration",
        "occupancy",
        "demand",
        "gpu",
        "rivals",
        "determinism",
        "peers",
        "operands",
        "inputs",
        "blocks",
        "captures",
        "trace",
        "derivatives",
        "gradients",
    },
    {
        "tune",
        "winner",
        "plan",
        "study",
        "ledger",
        "storage",
        "importance",
        "simulate",
        "contest",
        "workshop",
        "workers",
        "jobs",
        "inspecting",
        "finals",
    },
    {
        "dispatch",
        "short",
        "answer",
        "learning",
        "paired",
        "arguments",
        "sdpa_arguments",
        "modifying",
        "packing",
        "prepared",
        "recent",
        "redone",
        "seeing",
        "module",
        "functional",
        "masks",
        "dilated",
        "multihead",
        "operators",
        "differentiate",
        "traced",
        "signatures",
    },
    {
        "verify",
        "bundle",
        "bench",
        "entrants",
        "ablate",
        "ablation",
        "comparison",
        "training",
        "timetable",
        "passes",
        "passing",
        "transformer",
        "report",
        "cli",
        "__main__",
    },
)
FACE = "__init__"  # autoattn itself: the public names of floor 4

# Packages that a floor may import, beside the standard library and those of the floors below it.
PACKAGES = (
    set(),
    {"jinja2", "yaml", "msgspec", "platformdirs", "filelock"},
    {"torch", "triton", "numpy", "pynvml", "flash_attn", "flash_attn_interface"},
    {"optuna"},
    {"typing_extensions"},  # for type checkers alone
    {"typer", "rich", "transformers", "huggingface_hub"},
)
DOORS = {
    "jinja2": {"render", "report"},
    "yaml": {"resources"},
    "platformdirs": {"resources"},
    "optuna": {"study", "ledger", "storage", "importance"},
    "flash_attn": {"peers"},
    "flash_attn_interface": {"peers"},
    "triton.compiler": {"compile"},
    "triton.backends": {"compile", "assembler"},
    "triton.runtime.interpreter": {"interpreter"},
    "typer": {"cli"},
    "rich": {"cli"},
    "transformers": {"cli"},
    "huggingface_hub": {"cli"},
}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def floor_of(room: str) -> int:
    if room == FACE:
        return 4
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imports(source: str, package: str = "autoattn") -> Iterator[str]:
    """Dotted names that a module imports, wherever in it; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("__import__", "import_module", "importlib.import_module"):
                yield str(node.args[0].value)


def rooms_imported(source: str) -> set[str]:
    """The rooms of the package among them; a name that is no room is one of the package's own public names."""
    known = set().union(*FLOORS)
    found = set()
    for name in imports(source):
        head, _, rest = name.partition(".")
        room = rest.partition(".")[0]
        if head == "autoattn" and room != "__version__":  # a fact of the package, not one of its rooms
            found.add(room if room in known else FACE)
    return found


def packages_imported(source: str) -> set[str]:
    return {name for name in imports(source) if name.partition(".")[0] not in {"autoattn", *sys.stdlib_module_names}}


def faults(room: str, source: str) -> list[str]:
    """What a room imports and must not."""
    floor = floor_of(room)
    found = []
    for other in sorted(rooms_imported(source) - {room}):
        if floor_of(other) > floor:
            found.append(f"{room} (floor {floor}) imports {other} (floor {floor_of(other)})")
        if floor == 4 and floor_of(other) == 3:
            found.append(f"{room} runs inside models, but imports {other} of the search")
    allowed = set().union(*(PACKAGES[number] for number in range(floor + 1) if (floor, number) != (4, 3)))
    for name in sorted(packages_imported(source)):
        if name.partition(".")[0] not in allowed:
            found.append(f"{room} (floor {floor}) imports {name}")
        for door, rooms in DOORS.items():
            if (name == door or name.startswith(f"{door}.")) and room not in rooms:
                found.append(f"{room} imports {name}, whose doors are {', '.join(sorted(rooms))}")
    if room != "compile" and "triton.compile" in {
        ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    }:
        found.append(f"{room} calls triton.compile, whose door is compile")
    return found


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward_through_the_doors(path: Path) -> None:
    assert faults(room_of(path), path.read_text(encoding="utf-8")) == []


def test_every_room_stands_on_one_floor() -> None:
    rooms = {room_of(path) for path in MODULES} - {FACE}
    counts = {room: sum(room in floor for floor in FLOORS) for room in rooms}
    assert {room: count for room, count in counts.items() if count != 1} == {}


def test_the_documents_name_every_room() -> None:
    named = set(re.findall(r"`(\w+)`", "".join(line for line in lines_of("docs/design.md") if line.startswith("| `"))))
    assert set().union(*FLOORS) - {"__main__"} - named == set()
    for number, rooms in enumerate(FLOORS):
        (row,) = (line for line in lines_of("CONTRIBUTING.md") if line.startswith(f"| {number} "))
        assert set(row.split("|")[2].replace(" ", "").split(",")) == rooms - {"__main__"}


def lines_of(document: str) -> list[str]:
    return (PACKAGE.parent / document).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("room", "source", "fault"),
    [
        ("problem", "import torch", "problem (floor 0) imports torch"),
        ("device", "def f():\n    from autoattn import cache", "device (floor 0) imports cache (floor 1)"),
        ("cache", "from autoattn.search.tuner import tune", "cache (floor 1) imports tune (floor 3)"),
        ("cache", "from .gpu import present", "cache (floor 1) imports gpu (floor 2)"),
        ("gpu", "from autoattn import attention", "gpu (floor 2) imports __init__ (floor 4)"),
        ("dispatch", "from autoattn import tune", "dispatch runs inside models, but imports tune of the search"),
        ("module", "import optuna", "module (floor 4) imports optuna"),
        ("__init__", "import autoattn.cli", "__init__ (floor 4) imports cli (floor 5)"),
        ("shapes", "import yaml", "shapes imports yaml, whose doors are resources"),
        ("verify", "import optuna", "verify imports optuna, whose doors are importance, ledger, storage, study"),
        ("gpu", "import importlib\nimportlib.import_module('pandas')", "gpu (floor 2) imports pandas"),
        ("model", "import triton\ntriton.compile(1)", "model calls triton.compile, whose door is compile"),
        ("model", "import triton.compiler", "model imports triton.compiler, whose doors are compile"),
    ],
)  # fmt: skip
def test_a_fault_is_seen(room: str, source: str, fault: str) -> None:
    assert fault in faults(room, source)


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return set(run.stdout.split())


def test_a_model_at_run_time_imports_nothing_of_the_search_or_the_command_line() -> None:
    rooms = [room for room in sorted(FLOORS[4]) if (PACKAGE / f"{room}.py").exists()]
    assert "dispatch" in rooms
    loaded = modules_after("import autoattn" + "".join(f", autoattn.{room}" for room in rooms))
    assert loaded.isdisjoint(
        {"optuna", "pandas", "typer", "rich", "autoattn.search.tuner", "autoattn.cli", "autoattn.report"}
    )


def test_help_imports_nothing_heavy() -> None:
    loaded = modules_after("from autoattn.cli.app import run\nrun(['tune', '--help'])")
    assert loaded.isdisjoint({"torch", "triton", "optuna", "jinja2", "numpy"})
