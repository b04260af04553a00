"""Renders a variant as a kernel's source; the only module that uses Jinja for kernels."""

from __future__ import annotations

from functools import lru_cache, partial

import jinja2

from autoattn.codegen import argument_names, precompiled, resources, search_space, template_facts
from autoattn.core import kernel_kind, triton_release
from autoattn.core.kernel_kind import AppendKind, KernelKind, MergeKind
from autoattn.core.mask import MaskKind
from autoattn.core.modifiers import Bias
from autoattn.core.problem import DType, Layout, Op, Problem
from autoattn.core.tile_widths import padded
from autoattn.core.variant import Source, Traits, Variant, digest_of
from autoattn.errors import CompileError, ProblemError
from autoattn.expressions import derivative

MAX_LINE = 120  # characters of a rendered line
MAX_SOURCES = 1024  # texts that are kept, of some 40 KB


def render(problem: Problem, variant: Variant, traits: Traits | None = None, *, release: str | None = None) -> Source:
    """Renders the kernel of `variant` for the kind of call that `problem` is.

    Problems of one kind share one source, which is rendered once; sizes never reach the text.

    Args:
        release: of Triton, as "3.9", whose names the text has; None is the one that is installed.

    Raises:
        CompileError: the tensors do not lie as the template's loads need them.
    """
    traits = traits if traits is not None else natural_traits(problem)
    if (reason := why_not(variant, problem, traits)) is not None:
        raise CompileError(reason)
    return source_of(kernel_kind.of(problem), variant, traits, release or triton_release.installed_release())


@lru_cache(maxsize=MAX_SOURCES)
def source_of(kind: KernelKind, variant: Variant, traits: Traits, release: str) -> Source:
    """The kernel of a variant for a kind of problem, in the names of a release of Triton."""
    return Source(name=kind.op.value, text=text_of(kind, variant, traits, release), variant=variant, traits=traits)


def digest_of_source(problem: Problem, variant: Variant, release: str | None = None) -> str:
    """The digest of the kernel that `render` gives for contiguous tensors.

    Where autoattn is installed, those of shipped kernels are taken from their files: Jinja needs 0.2 s for its first
    text. In a checkout templates may change, and files of other cache folders may be anybody's. A test renders all
    texts that are shipped.

    Raises:
        CompileError: the template has no such kernel.
    """
    traits, release = natural_traits(problem), release or triton_release.installed_release()
    if resources.is_installed():
        key = precompiled.key_of(kernel_kind.of(problem), variant, traits)
        for kernel in precompiled.read_any(resources.shipped_cache(), key):
            if release in kernel.facts.digests:
                return kernel.facts.digests[release]
    return render(problem, variant, traits, release=release).digest


@lru_cache(maxsize=256)
def append_source(kind: AppendKind) -> Source:
    """The kernel that appends keys and values to a cache; it has no search space, since it moves a few rows."""
    offset = "i64" if kind.wide else "i32"
    return _unsearched(
        "append",
        wide=kind.wide,
        element=argument_names.ELEMENT[kind.dtype],
        table_element=argument_names.ELEMENT[kind.tables],
        head_dim=kind.head_dim,
        head_dim_v=kind.head_dim_v,
        width=padded(kind.head_dim),
        width_v=padded(kind.head_dim_v),
        page=kind.page,
        cache_rows=kind.rows,
        float8_cache=kind.float8,
        latent=kind.latent,
        cache_element=argument_names.ELEMENT[DType.FLOAT8 if kind.float8 else kind.dtype],
        rotary_dim=kind.rotary_dim,
        interleaved=kind.interleaved,
        strides=partial(argument_names.typed_strides, offset=offset, strided=True),
    )


@lru_cache(maxsize=64)
def merge_source(kind: MergeKind) -> Source:
    """The kernel that merges two partial outputs; it has no search space, since memory alone decides its time."""
    width = padded(kind.head_dim)
    return _unsearched(
        "merge",
        wide=False,
        element=argument_names.ELEMENT[kind.first],
        second_element=argument_names.ELEMENT[kind.second],
        head_dim=kind.head_dim,
        width=width,
        rows=max(8, 4096 // width),
        dense=kind.dense,
        strides=partial(argument_names.typed_strides, offset="i64", strided=not kind.dense),
    )


def _unsearched(name: str, *, wide: bool, **facts: object) -> Source:
    """A kernel of the template of a name, which has no variants."""
    variant = Variant.of(f"triton/{name}", {})
    text = _environment().get_template(f"{variant.template}.py.j2").render(**facts)
    return Source(name=name, text=_folded(text), variant=variant, traits=Traits(alignment=1, wide=wide))


def forget() -> None:
    """Drops the texts that are kept."""
    source_of.cache_clear()


def text_of(kind: KernelKind, variant: Variant, traits: Traits, release: str) -> str:
    """The text of a variant for a kind of problem, in the names of a release of Triton."""
    template = _environment().get_template(f"{variant.template}.py.j2")
    text = template.render(
        template_facts.of_kernel(kind, variant, traits),
        problem=_words(kind),
        variant=variant,
        gluon=triton_release.gluon_names(release),
        **search_space.load(variant.template).params_of(variant),
    )
    return _folded(text)


def why_not(variant: Variant, problem: Problem, traits: Traits) -> str | None:
    """Why a template has no such kernel for tensors that lie as `traits` say, in one sentence; None when it has."""
    if (
        variant.as_dict().get("softmax") == template_facts.NO_SOFTMAX
        and (reason := _why_no_bound(variant, problem, traits)) is not None
    ):
        return reason
    if traits.merged and (problem.op is not Op.FORWARD or problem.dtype is DType.FLOAT8):
        return f"kernels merge outputs of float16, bfloat16 and float32 alone, got {problem}; merge its outputs apart"
    if problem.op is Op.BACKWARD and problem.modifiers.score_mod:
        try:
            derivative.of(problem.modifiers.score_mod)
        except ProblemError as error:
            return str(error)
    step = traits.alignment * problem.dtype.bytes
    needed = search_space.load(variant.template).step_bytes
    if step >= needed:
        return None
    return (
        f"the TMA unit reads rows that begin at multiples of {needed} bytes, got tensors where only {step} divide "
        "every step; make them contiguous, or use triton/forward"
    )


def _why_no_bound(variant: Variant, problem: Problem, traits: Traits) -> str | None:
    """Why a kernel without softmax cannot be; None when it can."""
    bare = not (problem.modifiers.names or problem.mask.sparse or problem.packed or traits.lse)
    bare = bare and variant.as_dict().get("SPLITS", 1) == 1
    if variant.template == "triton/forward" and bare and problem.dtype is not DType.FLOAT8:
        return None
    return (
        "only triton/forward has a kernel without softmax, for dense problems that change no scores, want no LSE and "
        f"split no keys, got {variant.template} and {problem}; leave this bound out"
    )


def natural_traits(problem: Problem, *, lse: bool = False) -> Traits:
    """The traits of contiguous tensors: a row of `head_dim` elements decides what divides the strides."""
    alignment = 16 // problem.dtype.bytes  # elements in the widest load of one thread, 16 bytes
    keys = alignment * problem.dtype.bytes // problem.key_bytes  # elements of a key in as many bytes
    while problem.head_dim % alignment or any(dim % keys for dim in (problem.head_dim, problem.head_dim_v)):
        alignment, keys = alignment // 2, keys // 2
    # A step in the sequence passes all heads, unless a head's rows lie together.
    heads = 1 if problem.layout is Layout.BHSD else problem.heads_q
    # Pages are found one by one, wherever they lie.
    seq_kv = problem.cache.page if problem.cache is not None and problem.cache.page else problem.seq_kv
    reach = max(problem.seq_q, seq_kv) * heads * max(problem.head_dim, problem.head_dim_v)
    added = argument_names.ELEMENT[problem.dtype.output]
    bias = {Bias.NONE: "", Bias.ADDITIVE: added, Bias.LEARNED: added}.get(problem.modifiers.bias, "u8")
    return Traits(
        alignment=alignment, wide=reach >= 2**31, lse=lse, bias=bias, bias_alignment=_natural_bias_alignment(problem)
    )


def _natural_bias_alignment(problem: Problem) -> int:
    """Of a contiguous bias; of none that may be learned, which keys may share."""
    if problem.modifiers.bias not in (Bias.ADDITIVE, Bias.BOOLEAN):
        return 0
    widest = 16 // (1 if problem.modifiers.bias is Bias.BOOLEAN else problem.dtype.output.bytes)
    return 1 if problem.seq_kv % widest else widest


def template_digest(template: str) -> str:
    """Names the text of a template and of its parts, which lie in three folders: its own, which has its name, and
    `shared` of its family and of all families.
    """
    path = resources.template_path(template)
    family = path.parent
    folders = family / path.name.partition(".")[0], family / "shared", family.parent / "shared"
    parts = [part for folder in folders for part in sorted(folder.glob("*.j2"))]
    return digest_of("".join(file.read_text(encoding="utf-8") for file in (path, *parts)))


def _words(kind: KernelKind) -> str:
    """What the kernel is compiled for, in words."""
    mask = kind.mask
    if mask.causal:
        shape = f"causal ({mask.alignment.value})"
    elif mask.kind is MaskKind.WINDOW:
        shape = "window bounded on the " + " and the ".join(
            side for side, bounded in (("left", mask.bounded_left), ("right", mask.bounded_right)) if bounded
        )
    else:
        shape = f"a table of blocks of {mask.block_q} by {mask.block_kv}" if mask.sparse else "no mask"
    precision = f" ({kind.precision.value} products)" if kind.dtype is DType.FLOAT32 else ""
    dims = f"head dim {kind.head_dim}"
    dims += f", values {kind.head_dim_v}" if kind.head_dim_v != kind.head_dim else ""
    words = [f"{kind.dtype.value}{precision}", dims, shape, *(["packed"] if kind.packed else [])]
    words += [] if kind.cache is None else [f"cache {kind.cache}"]
    return ", ".join([*words, *kind.modifiers.names])


def _folded(text: str) -> str:
    """The text with lines of at most MAX_LINE characters: longer ones go on behind a comma or "&" in their brackets."""
    lines: list[str] = []
    depth = 0  # of brackets that are open where a line begins
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        if depth == 0:
            indent += "        " if line.startswith("def ") else "    "
        while len(line) > MAX_LINE and (cut := _cut(line, depth)):
            lines.append(line[:cut])
            depth += _opened(line[:cut])
            line = indent + line[cut + 1 :]
        lines.append(line)
        depth += _opened(line)
    return "\n".join(lines)


def _cut(line: str, depth: int) -> int:
    """Behind which character to go on in a new line: the last comma that fits, as far outside as there is one, or else
    the last "&"; 0 when there is none."""
    best, outside, index, last_and = 0, 0, 0, 0
    for place, letter in enumerate(line[:MAX_LINE], start=1):
        depth += (letter in "([{") - (letter in ")]}")
        index += (letter == "[") - (letter == "]")
        if depth <= 0 or index or line[place : place + 1] != " ":
            continue  # an index stays in one piece
        if letter == "," and (not best or depth <= outside):
            best, outside = place, depth
        last_and = place if letter == "&" else last_and
    return best or last_and


def _opened(text: str) -> int:
    """How many more brackets open than close."""
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.root() / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
