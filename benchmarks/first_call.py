"""The first call of a fresh process with empty caches, where no compiler is installed.

python benchmarks/first_call.py [--repeats 5]

For each call, processes are started one after the other, with a PATH that has no compiler and empty caches of Triton's
and of autoattn's. A process imports torch and autoattn, makes its tensors, and runs a first backward pass of PyTorch's,
which imports 0.5 s of modules. Then it measures the host and the card together: the first call, and the second one.
Run it with an installed autoattn, which takes digests of shipped kernels from their files; a checkout renders texts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROCESS = """
import json, shutil, sys, time
import torch, triton
begin = time.perf_counter()
import autoattn
attention = autoattn.attention  # names are imported when they are asked for
imported = (time.perf_counter() - begin) * 1e3
from autoattn.codegen import resources

batch, heads, heads_kv, seq_q, seq_kv, head_dim, dtype, learns, words = json.loads(sys.argv[1])
assert shutil.which("gcc") is None and shutil.which("cc") is None
shapes = ((heads, seq_q), (heads_kv, seq_kv), (heads_kv, seq_kv))
three = [torch.randn(batch, *shape, head_dim, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes]
leaves = [tensor.requires_grad_(learns) for tensor in three]
warm = torch.ones(2, device="cuda", requires_grad=True)
(warm * warm).backward(warm.detach())
push = torch.randn(batch, heads, seq_q, head_dim, device="cuda", dtype=getattr(torch, dtype))

def step():
    torch.cuda.synchronize()
    begin = time.perf_counter()
    output = attention(*leaves, **words)
    if learns:
        output.backward(push)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3

times = [step(), step()]
said = autoattn.explain(*leaves, **words)
ready = bool(said.precompiled and (not learns or said.gradients is None or said.gradients.precompiled))
print(json.dumps({
    "ms": times, "import_ms": imported, "precompiled": ready, "installed": resources.is_installed(),
    "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
}))
"""


@dataclass(frozen=True)
class Case:
    """A call: sizes, dtype, whether it has gradients, and its arguments."""

    name: str
    sizes: tuple[int, int, int, int, int, int]  # batch, heads, key heads, queries, keys, head dim
    dtype: str = "bfloat16"
    learns: bool = False
    words: dict[str, object] | None = None

    @property
    def text(self) -> str:
        """For the process."""
        return json.dumps([*self.sizes, self.dtype, self.learns, self.words or {}])


CAUSAL: dict[str, object] = {"causal": True}
CASES = (
    Case("decode, B8 H32/8 8,192 keys D128", (8, 32, 8, 1, 8192, 128)),
    Case("prompt, B2 H16 S2,048 D128 causal", (2, 16, 16, 2048, 2048, 128), words=CAUSAL),
    Case("prompt, B2 H32/8 S4,096 D64 causal, fp16", (2, 32, 8, 4096, 4096, 64), "float16", words=CAUSAL),
    Case("training, B2 H16 S2,048 D128 causal", (2, 16, 16, 2048, 2048, 128), learns=True, words=CAUSAL),
)


def measured(case: Case, folder: Path) -> dict[str, object]:
    """What one process says of a call."""
    environment = {name: text for name, text in os.environ.items() if name not in ("CC", "CXX", "CUDA_HOME")}
    environment |= {
        "PATH": str(folder), "HOME": str(folder), "TRITON_CACHE_DIR": str(folder / "triton"),
        "AUTOATTN_CACHE": str(folder / "own"),
    }  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-c", PROCESS, case.text], env=environment, capture_output=True, text=True, cwd=folder
    )
    if child.returncode:
        raise SystemExit(f"{case.name} must run without a compiler, but failed:\n{child.stderr[-2000:]}")
    said: dict[str, object] = json.loads(child.stdout.splitlines()[-1])
    said["compiled"] = (folder / "triton").exists()
    return said


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="processes for each call")
    repeats = parser.parse_args().repeats
    if repeats < 1:
        parser.error(f"--repeats must be at least 1, got {repeats}; correct it")
    rows, facts = [], {}
    for case in CASES:
        said = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                said.append(measured(case, Path(folder)))
        facts = said[-1]
        first, second = zip(*(each["ms"] for each in said), strict=True)  # type: ignore[arg-type]
        ready = "yes" if all(each["precompiled"] and not each["compiled"] for each in said) else "no"
        spread = f"{min(first):.0f} to {max(first):.0f}"
        imported = statistics.median([each["import_ms"] for each in said])  # type: ignore[type-var]
        medians = f"{imported:.0f} | {statistics.median(first):.0f} | {spread} | {statistics.median(second):.2f}"
        rows.append(f"| {case.name} | {medians} | {ready} |")
    place = "installed" if facts["installed"] else "from a checkout"
    print(
        f"{facts['card']}, torch {facts['torch']}, Triton {facts['triton']}, autoattn {place}; {repeats} processes each"
    )
    print()
    print("| call | import autoattn, ms | first, ms | spread | second, ms | precompiled |\n|---|--:|--:|--:|--:|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
