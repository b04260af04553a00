"""Rendered kernels: what reaches their text, what does not, and that a person can read it.

The files in tests/golden show what the template gives. After a change of the template, write them anew and read the
difference:

    AUTOATTN_WRITE_GOLDEN=1 python -m pytest tests/codegen/test_render.py
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gluon_kernels
import hopper_gradients
import kernels
import latent_kernels
import pytest
from checkout_paths import GOLDEN

from autoattn.codegen import render, resources, search_space
from autoattn.core import kernel_kind, triton_release
from autoattn.core.key_cache import KeyCache
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Op, Precision
from autoattn.core.variant import Source, Traits, Value, Variant
from autoattn.errors import UsageError
from autoattn.kernels import interpreter

COVERED = list(kernels.every_text())
EVERY_TEXT = [source for _, source in COVERED]
INDEX = next(repair for repair in interpreter.REPAIRS if repair.name == "index")
TEXTS = pytest.mark.parametrize("source", EVERY_TEXT, ids=lambda source: source.digest)


@pytest.mark.parametrize("problem", [problem for problem, _ in COVERED[::3]], ids=str)
def test_problems_that_differ_only_in_the_launch_share_one_digest(problem) -> None:
    point = kernels.variant(PERSISTENT=2, HEAD_GROUP=4)
    traits = replace(render.natural_traits(problem), alignment=1)
    digests = {render.render(other, point, traits).digest for other in kernels.relatives(problem)}
    assert digests == {render.render(problem, point, traits).digest}
    assert all(kernel_kind.shares_kernels(problem, other) for other in kernels.relatives(problem))


def test_no_number_of_the_launch_reaches_the_text() -> None:
    sizes = {"batch": 971, "heads_q": 6 * 983, "heads_kv": 983, "seq_q": 991, "seq_kv": 997}
    problem = kernels.problem(**sizes, mask="causal")
    numbers = {int(number) for number in re.findall(r"\d+", kernels.source(problem).text)}
    assert numbers.isdisjoint({*sizes.values(), problem.group_size, problem.seq_kv - problem.seq_q})


def test_no_width_density_or_token_count_reaches_the_text() -> None:
    window = kernels.problem(mask="window:971,983")
    sparse = kernels.problem(mask="blocks:16x16,0.3125")
    packed = kernels.problem(layout=Layout.PACKED, batch=977, tokens_q=971, tokens_kv=983)
    for problem in (window, sparse, packed):
        numbers = set(re.findall(r"[0-9.]+", kernels.source(problem).text))
        assert numbers.isdisjoint({"971", "983", "977", "0.3125"})


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": DType.BFLOAT16},
        {"dtype": DType.FLOAT32},
        {"dtype": DType.FLOAT32, "precision": Precision.TF32},
        {"head_dim": 24},
        {"mask": "full"},
        {"mask": "causal:top-left"},
        {"mask": "window:5,0"},
        {"mask": "window:5,5"},
        {"mask": "window:-1,5"},
        {"mask": "blocks:16x16,0.5"},
        {"mask": Mask.blocks(16, 16, 0.5, "q_idx > kv_idx")},
        {"head_dim_v": 24},
        {"dtype": DType.FLOAT8},
        {"dtype": DType.FLOAT32, "precision": Precision.TF32X3},
        {"layout": Layout.PACKED, "tokens_q": 33, "tokens_kv": 50},
        *({"modifiers": modifiers} for modifiers in kernels.MODIFIERS[1:]),
    ],
    ids=str,
)
def test_what_a_kernel_is_compiled_for_reaches_the_text(change: dict) -> None:
    problem = kernels.problem(mask="causal")
    other = kernels.problem(**{"mask": "causal", **change})
    digests = {
        kernels.source(each, replace(render.natural_traits(each), alignment=1)).digest for each in (problem, other)
    }
    assert len(digests) == 2


@pytest.mark.parametrize("traits", [Traits(alignment=1), Traits(alignment=4), Traits(wide=True), Traits(lse=True)])
def test_every_trait_reaches_the_text(traits: Traits) -> None:
    problem = kernels.problem()
    assert kernels.source(problem, traits).digest != kernels.source(problem, Traits()).digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BLOCK_M", 32), ("BLOCK_N", 32), ("num_warps", 2), ("num_stages", 3), ("maxnreg", 128), ("mask_loop", "every"),
        ("mask_loop", "branch"), ("softmax", "lazy"), ("softmax", "first_max"), ("barrier", "after_qk"),
        ("barrier", "before_pv"), ("barrier", "loop_end"), ("HEAD_GROUP", 0), ("row_order", "ascending"),
        ("PERSISTENT", 1), ("HEAD_SPLIT", 1), ("SPLITS", 2), ("PACK_GQA", 1),
    ],
)  # fmt: skip
def test_every_parameter_changes_what_is_compiled(name: str, value: Any) -> None:
    problem = kernels.problem(mask="causal", head_dim=80)
    assert code_of(kernels.source(problem)) != code_of(kernels.source(problem, **{name: value}))


def code_of(source: Source) -> str:
    """The text without its docstrings and comments, so that a parameter named there alone does not count."""
    tree = ast.parse(source.text)
    return "\n".join(ast.unparse(node) for node in tree.body[1:])


def test_rendering_twice_gives_the_same_text() -> None:
    assert [source.text for _, source in kernels.every_text()] == [source.text for source in EVERY_TEXT]


@TEXTS
def test_a_rendered_file_is_python_that_imports_only_triton(source: Source) -> None:
    tree = ast.parse(source.text)
    compile(tree, "kernel.py", "exec")
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"triton", "triton.language"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


@TEXTS
def test_a_rendered_file_reads_like_written_by_hand(source: Source) -> None:
    lines = source.text.split("\n")
    assert lines[-1] == "", "it ends with a newline"
    assert lines[-2] != "", "with one newline"
    assert [line for line in lines if line != line.rstrip()] == []
    assert [line for line in lines if len(line) > 120] == []
    assert [line for line in lines if "{{" in line or "{%" in line or "{#" in line or "\t" in line] == []
    assert "\n\n\n\n" not in source.text, "no more than two blank lines"
    assert "None" not in re.sub(r"\[(None, :|:, None)\]", "", source.text), "no value that the template lacked"


@TEXTS
def test_every_name_in_a_rendered_file_is_bound_and_every_helper_called(source: Source) -> None:
    tree = ast.parse(source.text)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    arguments = {argument.arg for function in functions for argument in function.args.args}
    names = {function.name for function in functions}
    builtin = {"range", "min", "max", "float"}
    assert loaded <= stored | arguments | names | builtin | {"triton", "tl"}
    assert names - {"grid", "arrivals", "partials", "forward"} <= loaded


@TEXTS
def test_the_signature_names_the_kernels_parameters_in_order(source: Source) -> None:
    tree = ast.parse(source.text)
    kernel = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == source.name)
    table = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SIGNATURE"
    )
    assert [argument.arg for argument in kernel.args.args] == list(ast.literal_eval(table))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "alignment"),
    [
        (128, DType.BFLOAT16, 8), (8, DType.FLOAT16, 8), (56, DType.FLOAT16, 8), (20, DType.FLOAT16, 4),
        (6, DType.FLOAT16, 2), (57, DType.FLOAT16, 1), (128, DType.FLOAT32, 4), (58, DType.FLOAT32, 2),
        (111, DType.FLOAT32, 1),
    ],
)  # fmt: skip
def test_contiguous_tensors_are_aligned_to_what_divides_a_row(head_dim: int, dtype: DType, alignment: int) -> None:
    assert render.natural_traits(kernels.problem(head_dim=head_dim, dtype=dtype)) == Traits(alignment=alignment)


@pytest.mark.parametrize(
    ("layout", "heads", "seq", "wide"),
    [
        (Layout.BHSD, 64, 2**24 - 1, False),
        (Layout.BHSD, 1, 2**24, True),
        (Layout.BSHD, 64, 2**18 - 1, False),
        (Layout.BSHD, 64, 2**18, True),
    ],
)
def test_contiguous_tensors_are_wide_from_2_to_the_31_elements_in_a_head(
    layout: Layout, heads: int, seq: int, wide: bool
) -> None:
    for lengths in ({"seq_q": seq, "seq_kv": 9}, {"seq_q": 9, "seq_kv": seq}):
        problem = kernels.problem(layout=layout, heads_q=heads, heads_kv=heads, head_dim=128, **lengths)
        assert render.natural_traits(problem).wide is wide


def test_a_problem_alone_is_rendered_with_its_natural_traits() -> None:
    problem = kernels.problem(head_dim=20)
    assert kernels.source(problem) == kernels.source(problem, render.natural_traits(problem))


def test_a_template_name_that_leaves_the_folder_is_refused() -> None:
    for name in ("../secret/file", "triton/../../etc", "/etc/passwd", "triton"):
        with pytest.raises(UsageError, match="family/operation"):
            render.template_digest(name)


def test_the_template_digest_follows_its_text_and_its_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = resources.template_path(kernels.TEMPLATE)
    before = render.template_digest(kernels.TEMPLATE)
    family = tmp_path / "family"
    shutil.copytree(path.parent / "forward", family / "forward")
    shutil.copytree(path.parent / "shared", family / "shared")
    shutil.copytree(path.parent.parent / "shared", tmp_path / "shared")
    (family / "other.py.j2").write_text("another template", encoding="utf-8")
    copy = Path(shutil.copy(path, family))
    monkeypatch.setattr(resources, "template_path", lambda name: copy)
    digests = [render.template_digest(kernels.TEMPLATE)]
    assert digests == [before]
    for part in ("family/forward.py.j2", "family/forward/part.j2", "family/shared/part.j2", "shared/part.j2"):
        (tmp_path / part).write_text("{# nothing #}", encoding="utf-8")
        digests.append(render.template_digest(kernels.TEMPLATE))
    assert len(set(digests)) == 5


@pytest.mark.parametrize("name", [name for op in Op for name in resources.template_names(op)])
def test_a_template_has_only_parts_that_its_digest_follows(name: str) -> None:
    root = resources.template_path(name).parent.parent
    family = name.split("/")[0]
    folders = {name, f"{family}/shared", "shared"}
    texts = [resources.template_path(name), *(part for folder in folders for part in (root / folder).glob("*.j2"))]
    named = {part for text in texts for part in re.findall(r'"([a-z_/]+)\.j2"', text.read_text(encoding="utf-8"))}
    assert {part.rpartition("/")[0] for part in named} <= folders


def test_no_template_file_has_more_than_400_lines() -> None:
    files = resources.template_path(kernels.TEMPLATE).parent.parent.rglob("*.j2")
    assert {file.name: lines for file in files if (lines := file.read_text(encoding="utf-8").count("\n")) > 400} == {}


# --- it stands alone --------------------------------------------------------------------------------------------------

ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
assert "autoattn" not in sys.modules

import math, torch
torch.manual_seed(0)
q, k, v = (torch.randn(2, heads, seq, 24) for heads, seq in ((4, 33), (2, 50), (2, 50)))
out, lse = torch.full_like(q, math.nan), torch.full((2, 4, 33), math.nan)
values = {"query_ptr": q, "key_ptr": k, "value_ptr": v, "output_ptr": out, "lse_ptr": lse, "batch_heads": 8,
          "heads_q": 4, "group_size": 2, "seq_q": 33, "seq_kv": 50, "scale_log2": 24 ** -0.5 * math.log2(math.e)}
for name, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
    values |= {f"stride_{name}{axis}": stride for axis, stride in zip("bhsd", tensor.stride())}
arguments = [values[name] for name in kernel.SIGNATURE]
kernel.forward[kernel.grid(2, 4, 33, 1)](*arguments, **kernel.OPTIONS)
mask = torch.ones(33, 50, dtype=torch.bool).tril(17)
scores = (q @ k.repeat_interleave(2, 1).mT * 24 ** -0.5).masked_fill(~mask, -math.inf)
torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1))
torch.testing.assert_close(lse, scores.logsumexp(-1))
"""


@pytest.mark.interpreter
@pytest.mark.skipif(INDEX.is_needed(), reason=f"nothing mends Triton's interpreter there: {INDEX.reason}")
def test_an_exported_file_runs_without_autoattn_as_its_docstring_says(tmp_path: Path) -> None:
    problem = kernels.problem(dtype=DType.FLOAT32, head_dim=24, mask=Mask.parse("causal"))
    path = tmp_path / "kernel.py"
    path.write_text(kernels.source(problem, Traits(alignment=4, lse=True), PERSISTENT=1).text, encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", ALONE, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr


# --- what a score_mod reads once a head -------------------------------------------------------------------------------

HEADS = "captured0: float32[2]\nscore + captured0[b, h] * captured0[h, b] * score"
READERS = {  # template -> functions that read, each once a tile, or once a head where a program walks several
    "gluon/forward": {"attend", "attend_again"},
    "gluon/backward": {"consume", "sum_tile"},
    "triton/forward": {"attend", "forward"},
    "triton/backward": {"backward_queries", "backward_keys"},
}


def loops_around(tree: ast.AST, name: str, loops: int = 0) -> list[int]:
    """Of each call of a function, how many loops stand around it."""
    counts = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            counts.append(loops)
        counts += loops_around(node, name, loops + isinstance(node, ast.For | ast.While))
    return counts


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.PACKED])
@pytest.mark.parametrize("template", READERS)
def test_what_is_read_once_a_head_is_read_in_front_of_the_loop_over_its_pairs(template: str, layout: Layout) -> None:
    make = gluon_kernels.problem if template.endswith("forward") else hopper_gradients.problem
    problem = make(head_dim=64, mask="causal", layout=layout, modifiers=Modifiers(score_mod=HEADS))
    text = render.render(problem, search_space.load(template).default(problem, gluon_kernels.H200)).text
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert [name for name in functions if "load(captured0_ptr" in ast.unparse(functions[name])] == ["read_by_head"]
    around = {name: loops_around(body, "read_by_head") for name, body in functions.items()}
    assert {name for name, loops in around.items() if loops} <= READERS[template]
    assert max(itertools.chain(*around.values())) == (1 if template.endswith("backward") else 0), "that over heads"
    if layout is Layout.PACKED:  # a tile behind the last sequence reads what belongs to that one
        assert re.search(r"minimum\((sequence|b), batch - 1\)", text)


# --- golden files -----------------------------------------------------------------------------------------------------

HEAVY = Modifiers(
    score_mod="captured0: float32[2]\nslope = captured0[b, h]\nwhere(q_idx % 4 == 0, score * slope, score)",
    softcap=True, alibi=True, bias=Bias.ADDITIVE, sinks=True, dropout=True,
)  # fmt: skip
GLUON: dict[str, Value] = {
    "BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "softmax": "first_max", "overlap": 1, "mask_loop": "split",
    "schedule": "dynamic", "ping_pong": "mbarrier", "slot_release": "named", "v_wait": "late", "query_stages": 2,
    "output_buffer": "own", "queries_in": "shared", "row_sum": "last", "producer_registers": 24, "HEAD_GROUP": 1,
    "row_order": "descending", "software_exp2": 4,
}  # fmt: skip


def latent_source(cache: str, mask: str, **changes: Value) -> Source:
    """A kernel for a latent cache, with the LSE."""
    problem = latent_kernels.problem(cache, mask=mask, **latent_kernels.MLA)
    traits = render.natural_traits(problem, lse=True)
    return render.render(problem, latent_kernels.variant(**changes), traits, release="3.6")


GOLDEN_SOURCES = {
    "latent_bf16_d576_float8_persistent": latent_source(
        "paged:64,float8_e4m3,latent", "causal", byte_stages=4, PART_BLOCKS=4, PERSISTENT=1
    ),
    "latent_bf16_d576_few_rows": latent_source(
        "contiguous,latent,rows,leftpad", "full", BLOCK_M=16, BLOCK_N=64, SPLITS=4
    ),
    "forward_bf16_d128_causal": kernels.source(
        kernels.problem(dtype=DType.BFLOAT16, head_dim=128, mask="causal"),
        BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3,
    ),
    "forward_fp16_d56_full_first_max": kernels.source(
        kernels.problem(head_dim=56),
        Traits(lse=True),
        BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3, softmax="first_max", HEAD_GROUP=4,
    ),
    "forward_fp32_d111_top_left_strided": kernels.source(
        kernels.problem(dtype=DType.FLOAT32, head_dim=111, mask="causal:top-left"),
        Traits(alignment=1, wide=True, lse=True),
        BLOCK_M=32, num_warps=4, mask_loop="every", softmax="lazy", barrier="loop_end", row_order="ascending",
    ),
    "forward_tf32_d64_persistent": kernels.source(
        kernels.problem(dtype=DType.FLOAT32, precision=Precision.TF32, head_dim=64, mask="causal"),
        BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2, mask_loop="branch", HEAD_GROUP=0, PERSISTENT=2, maxnreg=168,
    ),
    "forward_bf16_d80_window": kernels.source(
        kernels.problem(dtype=DType.BFLOAT16, head_dim=80, mask="window:128,16"),
        BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3, HEAD_SPLIT=1,
    ),
    "forward_bf16_d576_float8_latent_causal": kernels.source(
        kernels.problem(
            dtype=DType.BFLOAT16, heads_q=16, heads_kv=1, seq_q=2, head_dim=576, head_dim_v=512, mask="causal",
            layout=Layout.BSHD, cache=KeyCache.parse("paged:64,float8_e4m3,latent"),
        ),
        BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=3, HEAD_SPLIT=1, PACK_GQA=1, SPLITS=64, SHARED_PROGRAMS=256,
    ),
    "forward_bf16_d128_packed_causal": kernels.source(
        kernels.problem(
            dtype=DType.BFLOAT16, head_dim=128, mask="causal", layout=Layout.PACKED, tokens_q=70, tokens_kv=120
        ),
        BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2,
    ),
    "forward_bf16_d128_paged_first_block_ahead": kernels.source(
        kernels.problem(
            dtype=DType.BFLOAT16, heads_q=32, heads_kv=8, seq_q=1, head_dim=128, layout=Layout.BSHD,
            cache=KeyCache.parse("paged:16"),
        ),
        BLOCK_M=16, BLOCK_N=128, num_warps=4, num_stages=2, SPLITS=8, PACK_GQA=1, mask_loop="every",
        first_block="ahead", parts_read="at_once",
    ),
    "forward_bf16_d64_shared_tiles_added_by_rows": kernels.source(
        kernels.problem(dtype=DType.BFLOAT16, head_dim=64, seq_q=1),
        BLOCK_M=16, BLOCK_N=128, num_warps=4, num_stages=3, SPLITS=64, PACK_GQA=1, mask_loop="branch",
        parts_read="by_rows",
    ),
    "forward_bf16_d128_shared_tiles_of_packed_heads": kernels.source(
        kernels.problem(dtype=DType.BFLOAT16, head_dim=128, mask="causal"),
        Traits(lse=True),
        BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3, SPLITS=32, PACK_GQA=1,
    ),
    "forward_fp16_d64_blocks_of_documents": kernels.source(
        kernels.problem(
            head_dim=64, mask=Mask.blocks(128, 128, 0.25, "captured0: int32[1]\ncaptured0[q_idx] == captured0[kv_idx]")
        ),
        BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3, softmax="first_max",
    ),
    "forward_fp8_d128_192_modified": kernels.source(
        kernels.problem(dtype=DType.FLOAT8, head_dim=192, head_dim_v=128, mask="window:255,0", modifiers=HEAVY),
        Traits(alignment=16, lse=True, bias="bf16"),
        BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2, PERSISTENT=1,
    ),
    "gluon_fp8_d128_full_lazy": render.render(
        kernels.problem(dtype=DType.FLOAT8, head_dim=128),
        Variant.of("gluon/forward", GLUON | {"softmax": "lazy", "overlap": 0}),
        Traits(alignment=16, lse=True),
        release="3.6",
    ),
    "forward_bf16_d64_merged": kernels.source(
        kernels.problem(dtype=DType.BFLOAT16, head_dim=64),
        Traits(lse=True, merged="fp32"),
        BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3,
    ),
    "gluon_bf16_d128_merged": render.render(
        kernels.problem(dtype=DType.BFLOAT16, head_dim=128),
        Variant.of("gluon/forward", GLUON),
        Traits(lse=True, merged="fp32"),
        release="3.6",
    ),
    "gluon_bf16_d128_packed_score_mod": render.render(
        kernels.problem(
            dtype=DType.BFLOAT16, head_dim=128, mask="causal", layout=Layout.PACKED, tokens_q=70, tokens_kv=120,
            modifiers=Modifiers(score_mod="captured0: float32[2]\n4 * tanh(score / 4) + captured0[b, kv_idx]"),
        ),
        Variant.of("gluon/forward", GLUON),
        Traits(lse=True),
        release="3.6",
    ),
    "gluon_bf16_d80_two_tiles": render.render(
        kernels.problem(dtype=DType.BFLOAT16, head_dim=80),
        Variant.of("gluon/forward", GLUON | {"BLOCK_N": 96, "HEAD_SPLIT": 1}),
        release="3.6",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN_SOURCES)
def test_a_golden_file_is_what_the_template_gives(name: str) -> None:
    path = GOLDEN / f"{name}.py"
    if os.environ.get("AUTOATTN_WRITE_GOLDEN"):
        path.write_text(GOLDEN_SOURCES[name].text, encoding="utf-8")
    assert GOLDEN_SOURCES[name].text == path.read_text(encoding="utf-8"), (
        "read what changed, then write the golden files anew with AUTOATTN_WRITE_GOLDEN=1"
    )


@pytest.mark.parametrize("release", triton_release.SUPPORTED)
def test_texts_for_two_releases_of_triton_differ_in_names_that_moved_alone(release: str) -> None:
    gradients = hopper_gradients.problem(head_dim=64, deterministic=True)
    for problem, variant in (
        (kernels.problem(dtype=DType.BFLOAT16, head_dim=80), Variant.of("gluon/forward", GLUON)),
        (gradients, hopper_gradients.variant(gradients, schedule="dynamic")),
        (kernels.problem(), kernels.variant()),
    ):
        oldest, text = (
            render.render(problem, variant, release=each).text for each in (triton_release.SUPPORTED[0], release)
        )
        names = [asdict(triton_release.gluon_names(each)) for each in (triton_release.SUPPORTED[0], release)]
        for stem, name in names[0].items():
            oldest = re.sub(rf"(?<![\w.]){re.escape(name)}\(|(?<=\.){name}\(", f"{names[1][stem]}(", oldest)
        assert "".join(text.split()) == "".join(oldest.split())  # lines may be folded elsewhere


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(GOLDEN_SOURCES)
