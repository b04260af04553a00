"""Imports follow the table of packages in CONTRIBUTING.md, never run in a circle, and use each dependency's doors.

Everything is read from the source, lazy imports included.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from checkout_paths import CHECKOUT

ROOT = "autoattn"
MODULES = sorted(path for path in (CHECKOUT / ROOT).rglob("*.py") if "_data" not in path.parts)
# Who may import a dependency, or a part of one: modules and packages.
DOORS = {
    "jinja2": {"codegen.render", "report"},
    "yaml": {"codegen.resources"},
    "platformdirs": {"codegen.resources"},
    "optuna": {"search.study", "search.shared_trials", "search.storage", "search.importance"},
    "flash_attn": {"baselines.external", "baselines.flash4_score_mods"},
    "cutlass": {"baselines.flash4_score_mods"},
    "flash_attn_interface": {"baselines.external"},
    "flashinfer": {"baselines.flashinfer_prefill"},
    "triton.compiler": {"kernels.compiler"},
    "triton.backends": {"kernels.compiler", "kernels.assembler"},
    "triton.runtime.interpreter": {"kernels.interpreter"},
    "pynvml": {"hardware.nvidia"},
    "typer": {"cli"},
    "pandas": {"frames"},
    "rich": {"cli"},
    "transformers": {"cli", "integrations.huggingface"},
    "diffusers": {"integrations.diffusers"},
    "comfy": {"integrations.comfyui"},
    "huggingface_hub": {"cli"},
}
REPLACING = ("setattr", "delattr", "getattr", "patch", "object")  # monkeypatch.setattr, mock.patch.object, ...


def table() -> dict[str, set[str]]:
    """Package -> what it may import besides those above it, in the order of CONTRIBUTING.md."""
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text.partition("## Packages")[2].partition("\n## ")[0], re.M)
    return {package: set(re.findall(r"\w+", besides)) for package, besides in rows}


PACKAGES = table()
ORDER = list(PACKAGES)


def name_of(path: Path) -> str:
    """A module's dotted name without the root's; the root itself keeps its name."""
    parts = path.relative_to(CHECKOUT / ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or ROOT


NAMES = {name_of(path): path for path in MODULES}


def package_of(name: str) -> str:
    return ROOT if name == "__main__" else name.partition(".")[0]


def imports(source: str) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("__import__", "import_module", "importlib.import_module"):
                yield str(node.args[0].value)


def own_imports(source: str) -> set[str]:
    """Modules of the package among them: the longest name that is a module; a public name belongs to the root."""
    modules = set()
    for name in imports(source):
        head, _, rest = name.partition(".")
        if head != ROOT or rest == "__version__":  # a fact of the package
            continue
        parts = rest.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        modules.add(next((prefix for prefix in prefixes if prefix in NAMES), ROOT))
    return modules


def faults(name: str, source: str, order: list[str] = ORDER) -> list[str]:
    """What a module imports and must not."""
    package, place = package_of(name), order.index(package_of(name))
    messages = [
        f"{name} imports {other}, which stands below {package}"
        for other in sorted(own_imports(source))
        if order.index(package_of(other)) > place and name != "__main__"
    ]
    allowed = PACKAGES[package]
    for dependency in sorted(set(imports(source))):
        head = dependency.partition(".")[0]
        if head == ROOT or head in sys.stdlib_module_names:
            continue
        if head not in allowed:
            messages.append(f"{name} imports {dependency}, which is not in the row of {package}")
        for door, rooms in DOORS.items():
            if f"{dependency}.".startswith(f"{door}.") and not any(f"{name}.".startswith(f"{room}.") for room in rooms):
                messages.append(f"{name} imports {dependency}, whose doors are {', '.join(sorted(rooms))}")
    calls_compiler = any(
        isinstance(node, ast.Attribute) and node.attr == "compile" and ast.unparse(node.value) == "triton"
        for node in ast.walk(ast.parse(source))
    )
    if name != "kernels.compiler" and calls_compiler:
        messages.append(f"{name} calls triton.compile, whose door is kernels.compiler")
    return messages


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle; none where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("name", NAMES)
def test_imports_run_downward_through_the_doors(name: str) -> None:
    assert faults(name, NAMES[name].read_text(encoding="utf-8")) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = {name: own_imports(path.read_text(encoding="utf-8")) - {name} for name, path in NAMES.items()}
    assert circle(graph) == []


def test_every_module_has_a_place_and_every_place_a_module() -> None:
    assert {package_of(name) for name in NAMES} == set(ORDER)


def test_every_package_says_what_it_holds() -> None:
    folders = {path.parent for path in MODULES}
    silent = [
        folder.name for folder in folders if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("core.problem", "import torch", "core.problem imports torch, which is not in the row of core"),
        ("core.device", "def f():\n    from autoattn.cache import store", "core.device imports cache.store, which"),
        ("cache.store", "from autoattn.search.tuner import tune", "cache.store imports search.tuner, which stands"),
        ("hardware.nvidia", "from autoattn import attention", "hardware.nvidia imports autoattn, which stands below"),
        ("runtime.call", "from autoattn.search import study", "runtime.call imports search.study, which stands below"),
        ("nn.attention", "import optuna", "nn.attention imports optuna, which is not in the row of nn"),
        ("autoattn", "import autoattn.cli", "autoattn imports cli, which stands below autoattn"),
        ("codegen.render", "import yaml", "codegen.render imports yaml, whose doors are codegen.resources"),
        ("search.tuner", "import optuna", "search.tuner imports optuna, whose doors are search.importance, "),
        ("hardware.timer", "import importlib\nimportlib.import_module('pandas')", "hardware.timer imports pandas"),
        ("runtime.call", "import triton\ntriton.compile(1)", "runtime.call calls triton.compile, whose door is"),
        ("runtime.call", "import triton.compiler", "runtime.call imports triton.compiler, whose doors are"),
    ],
)  # fmt: skip
def test_a_fault_is_seen(name: str, source: str, fault: str) -> None:
    assert any(each.startswith(fault) for each in faults(name, source))


def test_a_circle_is_seen() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def private_names(source: str) -> list[tuple[int, str]]:
    """Line and dotted name of each private name of the package that a test reads or replaces.

    A name is private where it begins with one underscore. Only what is read from a module or a class can be
    seen here: of `pool._workers` the source does not say whose attribute it is.
    """
    tree = ast.parse(source)
    meanings: dict[str, str] = {}  # what a local name stands for
    places: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                places.append((node.lineno, f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                meanings[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                places.append((node.lineno, alias.name))

    def meant(node: ast.expr) -> str:
        head, dot, rest = ast.unparse(node).partition(".")
        return meanings.get(head, "") + dot + rest

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("_"):
                places.append((node.lineno, meant(node)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in REPLACING:
            match node.args:
                case [ast.Constant(value=str(target)), *_]:
                    places.append((node.lineno, target))
                case [owner, ast.Constant(value=str(name)), *_]:
                    places.append((node.lineno, f"{meant(owner)}.{name}"))
    return sorted({(line, name) for line, name in places if is_private(name)})


def is_private(name: str) -> bool:
    """Whether a dotted name is a private one of a module or of a class of the package."""
    owner, _, last = name.rpartition(".")
    if not owner.startswith(ROOT) or not re.fullmatch(r"_(?!_)\w+", last):
        return False
    path = owner.removeprefix(f"{ROOT}.")
    module, _, member = path.rpartition(".")  # a member is a class, or a module that the other one imports
    modules = {known.rpartition(".")[2] for known in NAMES}
    of_class = member.lstrip("_")[:1].isupper()
    return owner == ROOT or path in NAMES or (module in NAMES and (of_class or member in modules))


def test_no_test_reads_a_private_name_of_the_package() -> None:
    paths = sorted(path for folder in ("tests", "benchmarks") for path in (CHECKOUT / folder).rglob("*.py"))
    read = [
        f"{path.relative_to(CHECKOUT)}:{line} reads {name}"
        for path in paths
        if "golden" not in path.parts
        for line, name in private_names(path.read_text(encoding="utf-8"))
    ]
    assert read == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from autoattn.cache import store\nstore._rendered()", "autoattn.cache.store._rendered"),
        ("from autoattn.cache import store as kept\nkept._rendered()", "autoattn.cache.store._rendered"),
        ("import autoattn.cache.store\nautoattn.cache.store._rendered()", "autoattn.cache.store._rendered"),
        ("def f():\n    from autoattn.cache.store import _rendered", "autoattn.cache.store._rendered"),
        ("from autoattn.search.tuner import Run\nRun._name", "autoattn.search.tuner.Run._name"),
        ("from autoattn.search import tuner\ntuner._Run", "autoattn.search.tuner._Run"),
        ("from autoattn.cache import store\nmonkeypatch.setattr(store, '_x', 1)", "autoattn.cache.store._x"),
        ("from autoattn.tools import bundle\nbundle.store._x", "autoattn.tools.bundle.store._x"),
        ("monkeypatch.setattr('autoattn.cache.store._x', 1)", "autoattn.cache.store._x"),
    ],
)
def test_a_private_name_is_seen(source: str, name: str) -> None:
    assert name in {seen for _, seen in private_names(source)}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._dynamo.reset()",
        "from autoattn.cache import store\nstore.__name__\nstore.read()",
        "from autoattn.cache import store\nmonkeypatch.setattr(store, 'read', 1)",
        "from autoattn.cache import store\nstore.things._x()",
        "store._x",
    ],
)
def test_other_names_are_no_fault(source: str) -> None:
    assert private_names(source) == []


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=CHECKOUT)
    return set(run.stdout.split())


def test_a_model_at_run_time_imports_nothing_of_the_search_or_the_command_line() -> None:
    above = ORDER[: ORDER.index(ROOT)]
    names = [name for name in NAMES if package_of(name) in above]
    assert "runtime.plan.planner" in names
    loaded = modules_after("import " + ", ".join(f"autoattn.{name}" for name in names))
    assert {name.split(".")[1] for name in loaded if name.startswith("autoattn.")} <= set(above)
    assert loaded.isdisjoint({"optuna", "pandas", "typer", "rich"})


def test_help_imports_nothing_heavy() -> None:
    loaded = modules_after("from autoattn.cli.app import run\nrun(['tune', '--help'])")
    assert loaded.isdisjoint({"torch", "triton", "optuna", "jinja2", "numpy"})
