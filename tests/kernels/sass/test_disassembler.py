"""The machine code reader: the ELF file, the names of instructions, and which loops of real kernels are reported."""

import re
import struct
import subprocess
from typing import Any

import kernels
import pytest
import triton
import triton.language as tl
from rarely import rarely
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autoattn.core.problem import DType
from autoattn.core.trial import StaticReport
from autoattn.errors import CompileError
from autoattn.kernels.compiler import inspect
from autoattn.kernels.sass import disassembler, opcode_cache

pytestmark = pytest.mark.sampled

BLOCK_M, BLOCK_N, HEAD_DIM, NUM_WARPS = 64, 32, 64, 4


@triton.jit
def walk(
    acc, m, s, q, k_ptrs, v_ptrs, lo, hi, o_m, stride, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, P: tl.constexpr
):
    o_n = tl.arange(0, BLOCK_N)
    for n in range(lo, hi, BLOCK_N):
        scores = tl.dot(q, tl.load(k_ptrs + n * stride), input_precision=P)
        if MASKED:
            scores = tl.where(o_m[:, None] >= (n + o_n)[None, :], scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(m - new)
        s = s * shrink + tl.sum(weights, 1)
        value = tl.load(v_ptrs + n * stride)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=P)
        m = new
    return acc, m, s


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    stride,
    keys,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    P: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_M
    o_m, o_n, o_d = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    q = tl.load(q_ptr + o_m[:, None] * stride + o_d[None, :])
    k_ptrs = k_ptr + o_n[None, :] * stride + o_d[:, None]
    v_ptrs = v_ptr + o_n[:, None] * stride + o_d[None, :]
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)
    s = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    lo = 0
    if SPLIT:
        lo = start // BLOCK_N * BLOCK_N
        acc, m, s = walk(acc, m, s, q, k_ptrs, v_ptrs, 0, lo, o_m, stride, BLOCK_N, False, P)
    acc, m, s = walk(acc, m, s, q, k_ptrs, v_ptrs, lo, keys, o_m, stride, BLOCK_N, True, P)
    tl.store(o_ptr + o_m[:, None] * stride + o_d[None, :], (acc / s[:, None]).to(o_ptr.dtype.element_ty))


@triton.jit
def copy(flat, nested, out_ptr):
    row = flat.load([0])
    tl.store(out_ptr + tl.arange(0, 64), row + nested.load([0, 0, 0, 0, 0]).reshape(64))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles the kernel above, each choice once."""
    done = {}

    def build(arch, *, split=True, element="bf16", precision="tf32", stages=2, block_m=BLOCK_M, maxnreg=None):
        key = (arch, split, element, precision, stages, block_m, maxnreg)
        if key not in done:
            names = attend.arg_names
            signature = dict.fromkeys(names, "constexpr") | dict.fromkeys(names[:4], f"*{element}")
            signature |= {"stride": "i32", "keys": "i32"}
            values = {"BLOCK_M": block_m, "BLOCK_N": BLOCK_N, "D": HEAD_DIM, "SPLIT": split, "P": precision}
            constants = {(names.index(name),): value for name, value in values.items()}
            aligned = {(i,): [["tt.divisibility", 16]] for i in range(5)}
            source = ASTSource(fn=attend, signature=signature, constexprs=constants, attrs=aligned)
            options = {"num_warps": NUM_WARPS, "num_stages": stages} | ({"maxnreg": maxnreg} if maxnreg else {})
            done[key] = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        return done[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield build


def read(kernel, arch):
    return disassembler.read(
        kernel.asm["cubin"], digest="d", arch=arch, shared_bytes=kernel.metadata.shared, num_warps=NUM_WARPS
    )


def masking(loop):
    return sum(loop.get(name, 0) for name in ("ISETP", "FSEL"))


# --- real kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", rarely([80, 86, 89], lambda arch: arch == 80))
def test_the_products_of_a_pass_are_those_that_the_tile_asks_for(compiled, arch):
    report = read(compiled(arch), arch)
    wanted = 4 * BLOCK_M * BLOCK_N * HEAD_DIM // (2 * 16 * 8 * 16) // NUM_WARPS
    assert report.loop["HMMA.16816.F32.BF16"] == wanted
    assert report.masked_loop["HMMA.16816.F32.BF16"] == wanted


@pytest.mark.parametrize("arch", rarely([80, 90, 100], lambda arch: arch == 90))
def test_a_pass_has_one_exp2_for_each_score_of_a_thread_and_few_more(compiled, arch):
    report = read(compiled(arch), arch)
    scores = BLOCK_M * BLOCK_N // (32 * NUM_WARPS)
    for loop in (report.loop, report.masked_loop):
        assert scores < loop["MUFU.EX2"] <= scores + 4


@pytest.mark.parametrize("arch", rarely([80, 86, 89, 90, 100], lambda arch: arch in (80, 90)))
def test_the_loop_that_masks_is_told_from_the_one_that_does_not(compiled, arch):
    report = read(compiled(arch), arch)
    assert masking(report.masked_loop) >= masking(report.loop) + BLOCK_M * BLOCK_N // (32 * NUM_WARPS)


@pytest.mark.parametrize("arch", rarely([80, 90, 100], lambda arch: arch != 100))
def test_a_kernel_with_one_loop_has_no_masked_loop(compiled, arch):
    report = read(compiled(arch, split=False), arch)
    assert report.loop["MUFU.EX2"] > 0
    assert report.masked_loop == {}


def test_warpgroup_products_keep_their_shape_and_where_their_left_factor_is(compiled):
    report = read(compiled(90), 90)
    assert report.loop["HGMMA.64x32x16.F32.BF16.SS"] == HEAD_DIM // 16
    assert report.loop["HGMMA.64x64x16.F32.BF16.RS"] == BLOCK_N // 16


@pytest.mark.parametrize("arch", [80, 90])
def test_ieee_float32_loops_are_found_by_their_multiplications(compiled, arch):
    report = read(compiled(arch, element="fp32", precision="ieee", block_m=16), arch)
    per_thread = 2 * 16 * BLOCK_N * HEAD_DIM // (32 * NUM_WARPS)
    assert per_thread <= report.loop["FFMA"] <= per_thread + 16
    assert report.masked_loop["MUFU.EX2"] > 0


def test_tf32_products_are_told_from_bfloat16_ones(compiled):
    report = read(compiled(80, element="fp32"), 80)
    assert report.loop["HMMA.1688.F32.TF32"] == 4 * BLOCK_M * BLOCK_N * HEAD_DIM // (2 * 16 * 8 * 8) // NUM_WARPS


def test_asynchronous_copies_show_with_their_width(compiled):
    assert read(compiled(80), 80).loop["LDGSTS.128"] == 2 * BLOCK_N * HEAD_DIM * 2 // 16 // (32 * NUM_WARPS)
    assert "LDGSTS.128" not in read(compiled(80, stages=1), 80).loop


@pytest.mark.parametrize(
    ("arch", "maxnreg"), rarely([(80, None), (80, 64), (90, None), (100, None)], lambda case: case[0] != 100)
)
def test_registers_and_stack_are_those_that_the_resource_listing_states(compiled, tmp_path, arch, maxnreg):
    kernel = compiled(arch, maxnreg=maxnreg)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    listed = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    report = read(kernel, arch)
    assert report.registers == int(re.search(r"REG:(\d+)", listed)[1])
    assert report.spilled_bytes == int(re.search(r"STACK:(\d+)", listed)[1])
    assert report.spilled_bytes > 0 if maxnreg else True


@pytest.mark.parametrize("arch", rarely([80, 90, 100], lambda arch: arch == 90))
def test_remembered_names_and_branches_agree_with_the_disassembler(compiled, monkeypatch, arch):
    kinds = ({"element": "fp16"}, {"element": "fp32"}, {}, {"split": False})  # each learns from those before it
    each = [compiled(arch, **kind).asm["cubin"] for kind in kinds]
    for name in ("base_names", "detailed_names"):
        monkeypatch.setattr(disassembler, name, {})
    for cubin in each:
        text = next(data for name, data in disassembler.sections_of(cubin).items() if name.startswith(".text."))
        code = disassembler.decode(cubin, text, arch)
        for at, name, rest in disassembler.disassemble(cubin):
            base = name.partition(".")[0]
            seen, target, _ = code[at // 16]
            assert seen == (disassembler.short_name(base, name, rest) if base in disassembler.DETAILED else base)
            assert (target is not None) == (base == "BRA")
    targets = {target for _, target, _ in code if target is not None}
    assert targets == labelled(each[-1])


def test_copies_of_one_dimension_and_of_five_have_names_of_their_own(monkeypatch):
    signature = {"flat": "tensordesc<fp16[64]>", "nested": "tensordesc<fp16[1,1,1,1,64]>", "out_ptr": "*fp16"}
    source = ASTSource(fn=copy, signature=signature, constexprs={})
    cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NUM_WARPS}).asm["cubin"]
    for name in ("base_names", "detailed_names"):
        monkeypatch.setattr(disassembler, name, {})
    text = next(data for name, data in disassembler.sections_of(cubin).items() if name.startswith(".text."))
    names = {name for name, *_ in disassembler.decode(cubin, text, 90)}
    assert {"UTMALDG.1D", "UTMALDG.5D"} <= names


def labelled(cubin):
    """Addresses that branches name, by the disassembler's own labels."""
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        lines = subprocess.run(
            [disassembler.disassembler(), "-c", "-ndf", file.name], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    places, waiting, wanted, last = {}, [], set(), -16
    for line in lines:
        if label := re.match(r"(\.L_x_\d+):", line):
            waiting.append(label[1])
        if code := re.match(r"\s*/\*([0-9a-f]{4,})\*/.*?;", line):
            last = int(code[1], 16)
            places |= dict.fromkeys(waiting, last)
            waiting = []
            if branch := re.search(r"\bBRA.*`\((\.L_x_\d+)\)", line):
                wanted.add(branch[1])
    return {places[label] for label in wanted}


def test_a_kernel_of_known_encodings_does_not_start_the_disassembler(compiled, monkeypatch):
    kernel = compiled(80)
    before = read(kernel, 80)
    monkeypatch.setattr(disassembler, "disassemble", lambda cubin: pytest.fail("the disassembler was started"))
    assert read(kernel, 80) == before


@pytest.fixture(autouse=True)
def encodings_of_this_test(monkeypatch, tmp_path):
    """Other tests share Triton's cache, where encodings are kept."""
    monkeypatch.setattr(opcode_cache, "path_of", lambda tool: tmp_path / "encodings" / "tool.json")


def forget(monkeypatch):
    """As if another process began now, with the same cache folder."""
    for name in ("base_names", "detailed_names"):
        monkeypatch.setattr(disassembler, name, {})
    monkeypatch.setattr(opcode_cache, "read_times", {})


def test_what_one_process_learned_spares_the_next_one_the_disassembler(compiled, monkeypatch):
    kernel = compiled(90)
    forget(monkeypatch)
    before = read(kernel, 90)
    forget(monkeypatch)
    monkeypatch.setattr(disassembler, "disassemble", lambda cubin: pytest.fail("the disassembler was started"))
    assert read(kernel, 90) == before


def test_encodings_are_kept_in_tritons_cache(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert opcode_cache.path_of(disassembler.disassembler()).parent == tmp_path / "autoattn"


@pytest.mark.parametrize("damage", [b"", b"{", b'[[["x"], "FFMA"]]', b"[[[1], 2]]", b"[1]"])
def test_a_damaged_file_of_encodings_is_as_good_as_none(compiled, monkeypatch, damage):
    kernel = compiled(80)
    forget(monkeypatch)
    before = read(kernel, 80)
    path = opcode_cache.path_of(disassembler.disassembler())
    path.write_bytes(damage)
    forget(monkeypatch)
    assert read(kernel, 80) == before
    forget(monkeypatch)
    monkeypatch.setattr(disassembler, "disassemble", lambda cubin: pytest.fail("the disassembler was started"))
    assert read(kernel, 80) == before, "the file is whole again"


def test_what_is_no_cubin_is_refused_in_one_sentence(compiled):
    whole = compiled(80).asm["cubin"]
    for broken in (b"", b"\x7fELF", b"text" * 100, whole[:200], whole[:18] + struct.pack("<H", 62) + whole[20:]):
        with pytest.raises(CompileError, match="compile the kernel again"):
            disassembler.read(broken, digest="d", arch=80, shared_bytes=0, num_warps=4)


@pytest.mark.parametrize(
    ("arch", "at", "low", "high", "target", "goes_on"),
    [
        (80, 0x1300, 0x0000325000003947, 0x000FEA0003800000, 0x4560, True),  # @P3 BRA
        (80, 0x4550, 0xFFFFD25000007947, 0x000FEA000383FFFF, 0x17B0, False),  # BRA, backwards
        (90, 0x12A0, 0x000000240064A947, 0x000FEA0003800000, 0x3840, True),  # @!P2 BRA
        (90, 0x5160, 0xFFFFFFFC00FC7947, 0x000FC0000383FFFF, 0x5160, False),  # BRA, to itself
        (100, 0x0, 0x000000A508A07547, 0x002FD8000B800000, 0xA690, True),  # BRA.U !UP0: the uniform predicate decides
    ],
)
def test_branches_are_read_from_their_encoding(arch, at, low, high, target, goes_on):
    assert disassembler.flow_of("BRA", at, low, high, arch) == (target, goes_on)


@pytest.mark.parametrize("name", ["LDL.64", "STL.128"])
@pytest.mark.parametrize(("moves", "measured"), [(0, True), (20, True), (21, False)])
def test_a_hopper_loop_with_more_than_2_moves_of_registers_in_100_is_not_measured(monkeypatch, name, moves, measured):
    loop = {"HGMMA.64x128x16.F32.BF16.SS": 16, "UTMALDG.4D": 2, "FFMA": 1000 - 18 - moves, name: moves}
    monkeypatch.setattr(disassembler, "sections_of", lambda cubin: {".text.forward": b""})
    monkeypatch.setattr(disassembler, "decode", lambda cubin, text, arch: [(each, None, True) for each in loop])
    facts: dict[str, Any] = {
        "digest": "d",
        "arch": 90,
        "registers": 168,
        "spilled_bytes": 64,
        "shared_bytes": 0,
        "num_warps": 4,
    }
    reason = disassembler.why_slow(StaticReport(**facts, code_bytes=16, loop=loop, masked_loop={}), b"")
    assert reason == ("" if measured else "each block of keys moves registers to and from memory in 21 instructions")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "product"), rarely([(80, "HMMA"), (90, "HGMMA")], lambda case: case[0] == 90))
def test_the_second_chance_that_multiplies_flags_is_not_taken_for_the_loop_that_masks(arch, product):
    """Of the shipped template, whose second chance also finds values of NaN and infinity by a product."""
    of = kernels.problem(dtype=DType.BFLOAT16, head_dim=128, mask="causal")
    report = inspect(kernels.source(of, BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3), arch)
    counts = [
        {name: n for name, n in loop.items() if name.startswith(product)} for loop in (report.loop, report.masked_loop)
    ]
    assert counts[0] == counts[1] != {}
    assert report.masked_loop["FSEL"] == 32  # one for each score of a thread
