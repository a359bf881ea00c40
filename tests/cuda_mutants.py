"""Plants bugs in the CUDA kernels, one at a time, and wants a run of the emulator to catch each.

    python tests/cuda_mutants.py [words of labels...] [--list] [--jobs N] [--trust]

Each mutant is one replacement in csrc/cuda.  The kernels of head dim 64 are compiled with it, and
the emulated tests of test_cuda_decode.py and test_cuda_extend.py run: plain, in three orders of
blocks and threads; then, while nothing was noticed, under ASan and UBSan, and under TSan (which
comes first for a barrier that is missing).  Prints which run caught it and by what.  Exits with 1
if one survives, with 2 if a text to replace is not there once, or if the tests fail without any
bug.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cuda_emulator"))
import build  # noqa: E402  (its folder is no package)

TESTS = [str(ROOT / "tests" / f"test_cuda_{name}.py") for name in ("decode", "extend")]
TIMEOUT = 900  # seconds for one run
ONE_DIM = "-DATTNKIT_HEAD_DIMS(X)=X(64, 64)"
SOURCES = ("few", "merge", "append", "plan")
# The kernels of one head dim and all types but fp16, whose code is that of bf16.
FEW = """
#include "decode.cuh"
namespace attnkit::cuda {
template <>
cudaError_t decode_16_bit<__half, 64, 64>(const DecodeParams&, cudaStream_t) {
  return cudaErrorInvalidValue;
}
template cudaError_t decode_dims<64, 64>(const DecodeParams&, cudaStream_t);
}  // namespace attnkit::cuda
"""


class Mutant(NamedTuple):
    label: str
    file: str  # in csrc/cuda
    old: str  # stands there once
    new: str
    tests: str = ""  # words of the tests that are run, if not all
    first: str = "plain"  # the run that is likeliest to notice it


MUTANTS = [
    # ---- which keys are visible
    Mutant(
        "band: right edge off by one",
        "work.cuh",
        "position + p.right + 1)",
        "position + p.right + 2)",
    ),
    Mutant(
        "band: left edge off by one",
        "work.cuh",
        "max(start, position - p.left)",
        "max(start, position - p.left + 1)",
    ),
    Mutant(
        "band: left padding ignored",
        "work.cuh",
        "{max(start, position - p.left)",
        "{max(0, position - p.left)",
    ),
    Mutant(
        "band: queries one too far",
        "work.cuh",
        "w.origin = w.length - p.queries;",
        "w.origin = w.length - p.queries + 1;",
    ),
    Mutant(
        "tiles: a boundary taken for a whole one",
        "work.cuh",
        "(tile + 1) * kTile > w_.all.to",
        "tile * kTile > w_.all.to",
    ),
    Mutant(
        "tiles: a window's boundary taken for a whole one",
        "work.cuh",
        "tile * kTile < w_.all.from",
        "(tile + 1) * kTile < w_.all.from",
    ),
    Mutant(
        "tiles: the last, partial one forgotten",
        "work.cuh",
        "end = (w.some.to + kTile - 1) / kTile",
        "end = w.some.to / kTile",
    ),
    Mutant("keep: ignored", "work.cuh", "(!p_.keep || ", "(true || "),
    Mutant(
        "keep: of another sequence",
        "work.cuh",
        "p_.keep[static_cast<int64_t>(w_.batch) * p_.capacity + slot]",
        "p_.keep[slot]",
    ),
    Mutant(
        "alibi: signed distance",
        "compute_mma.cuh",
        "static_cast<float>(abs(position_[h] - (tile * kTile + key)))",
        "static_cast<float>(position_[h] - (tile * kTile + key))",
        "alibi or attention",
    ),
    # ---- where keys lie
    Mutant(
        "pages: reads the slot behind the last",
        "work.cuh",
        "slot < w_.some.to &&",
        "slot <= w_.some.to &&",
    ),
    Mutant(
        "pages: the next page",
        "work.cuh",
        "table_ ? table_[page] : row_",
        "table_ ? table_[page + 1] : row_",
    ),
    Mutant(
        "pages: slot not counted from its page",
        "work.cuh",
        "slot - page * p_.page_slots)",
        "slot - (page > 0) * p_.page_slots)",
    ),
    Mutant(
        "pages: ids not checked",
        "work.cuh",
        "ATTNKIT_REQUIRE(0 <= place.x && place.x < p_.pages,",
        "ATTNKIT_REQUIRE(true,",
        "refused",
    ),
    Mutant(
        "pages: ids checked one too far",
        "work.cuh",
        "place.x < p_.pages,",
        "place.x <= p_.pages,",
        "refused",
    ),
    Mutant(
        "lengths: not checked",
        "work.cuh",
        "ATTNKIT_REQUIRE(0 <= held && held <= p.capacity - p.added,",
        "ATTNKIT_REQUIRE(true,",
        "refused",
    ),
    Mutant(
        "batch_index: ignored",
        "work.cuh",
        "p.batch_index ? p.batch_index[w.batch] : w.batch",
        "w.batch",
    ),
    Mutant(
        "copies: hidden slots are not zeroed",
        "work.cuh",
        "                              place.x < 0 ? 16 : 0);",
        "                              0);",
    ),
    Mutant(
        "copies: beyond the tile",
        "work.cuh",
        "to + key * L::kPitch + unit * 16, row",
        "to + (key + 1) * L::kPitch + unit * 16, row",
    ),
    Mutant(
        "copies: not aligned",
        "work.cuh",
        "row(a, place) + unit * 16, 16,",
        "row(a, place) + unit * 16 + 8, 16,",
    ),
    Mutant("division by the page size inexact", "plan.cu", "/ d + 1);", "/ d);"),
    # ---- splits and merging
    Mutant(
        "splits: a tile between them is lost",
        "work.cuh",
        "begin + w.split * each;",
        "begin + w.split * (each + 1);",
    ),
    Mutant(
        "splits: shares overlap",
        "work.cuh",
        "min(begin + tiles, w.first_tile + each)",
        "min(begin + tiles, w.first_tile + each + 1)",
    ),
    Mutant(
        "splits: all write to one place",
        "work.cuh",
        "p.plan.splits + w.split) * 2;",
        "p.plan.splits) * 2;",
    ),
    Mutant(
        "merge: weight of a share forgotten",
        "merge.cu",
        "share.y == 0.f ? 0.f : weight;",
        "share.y == 0.f ? 0.f : 1.f;",
    ),
    Mutant(
        "merge: sum not weighted",
        "merge.cu",
        "sum_lanes<32>(share.y * weight)",
        "sum_lanes<32>(share.y)",
    ),
    Mutant(
        "merge: no barrier before the weights are read",
        "merge.cu",
        "weights[own] = share.y == 0.f ? 0.f : weight;\n  __syncthreads();",
        "weights[own] = share.y == 0.f ? 0.f : weight;",
        first="tsan",
    ),
    Mutant(
        "sinks: not in the sum",
        "work.cuh",
        "if (p.sinks) total += exp2f",
        "if (false) total += exp2f",
    ),
    Mutant(
        "rows: the last ones have no block",
        "plan.cu",
        "(rows + r.row_tile - 1) / r.row_tile",
        "(rows + r.row_tile / 2 - 1) / r.row_tile + (rows < r.row_tile)",
    ),
    # ---- barriers and copies under way
    Mutant(
        "barrier: places not known",
        "decode.cuh",
        "  __syncthreads();  // the places are known\n",
        "",
        first="tsan",
    ),
    Mutant(
        "barrier: a tile is overwritten while it is used",
        "decode.cuh",
        "      __syncthreads();  // the tile before is used up, the places of the next are known\n",
        "",
        first="tsan",
    ),
    Mutant(
        "barrier: others' copies not waited for",
        "decode.cuh",
        "      __syncthreads();  // the copies of all threads have arrived\n",
        "",
        first="tsan",
    ),
    Mutant(
        "barrier: 8-bit copies not waited for",
        "decode.cuh",
        "      __syncthreads();  // the copies of all threads have arrived, the tile before is "
        "used up\n",
        "",
        first="tsan",
    ),
    Mutant(
        "barrier: read before it is widened",
        "decode.cuh",
        "      __syncthreads();  // the numbers are there, the places of the tile after the next "
        "are known\n",
        "",
        first="tsan",
    ),
    Mutant(
        "copies: the last tile is not waited for",
        "work.cuh",
        "  else\n    __pipeline_wait_prior(0);",
        "  else\n    __pipeline_wait_prior(1);",
    ),
    Mutant(
        "copies: scales in too few places",
        "work.cuh",
        "(which ? value_scales_ : key_scales_) + tile % kPlaces * kTile + x",
        "(which ? value_scales_ : key_scales_) + tile % 2 * kTile + x",
    ),
    # ---- tensor cores
    Mutant(
        "mma: keys in another order",
        "compute_mma.cuh",
        "first_key() + n * 8 + lane() % 8 + lane() / 16 * 8;",
        "first_key() + n * 8 + lane() % 16;",
    ),
    Mutant(
        "mma: outputs keep their old maximum",
        "compute_mma.cuh",
        "      out_[n][2 * h] *= shrink;\n",
        "",
    ),
    Mutant("mma: sums keep their old maximum", "compute_mma.cuh", "    sum_[h] *= shrink;\n", ""),
    Mutant(
        "mma: a warp's outputs unweighted",
        "compute_mma.cuh",
        "x.y += out_[n][2 * h + 1] * shrink[h];",
        "x.y += out_[n][2 * h + 1];",
    ),
    Mutant(
        "mma: warps add up without a barrier",
        "compute_mma.cuh",
        "            *reinterpret_cast<float2*>(to) = x;\n          }\n      __syncthreads();",
        "            *reinterpret_cast<float2*>(to) = x;\n          }",
        first="tsan",
    ),
    Mutant(
        "mma: rows that do not exist are written",
        "compute_mma.cuh",
        "        if (row >= w_.rows) continue;\n",
        "",
    ),
    Mutant(
        "mma: NaN of a hidden key comes through",
        "compute_mma.cuh",
        "    if (masked) settle_values(tile, values);\n",
        "",
    ),
    Mutant(
        "mma: values settled while others look",
        "compute_mma.cuh",
        "    __syncthreads();\n    for (int x = threadIdx.x; x < kTile * Values::kUnits * 4; "
        "x += kThreads) {\n      uint32_t& bits",
        "    for (int x = threadIdx.x; x < kTile * Values::kUnits * 4; "
        "x += kThreads) {\n      uint32_t& bits",
        "reaches",
        first="tsan",
    ),
    Mutant(
        "mma: scale of another key",
        "compute_mma.cuh",
        "product *= tiles_.key_scales(tile)[key];",
        "product *= tiles_.key_scales(tile)[key ^ 1];",
    ),
    Mutant(
        "mma: shared memory too small",
        "compute_mma.cuh",
        "(kRowWarps == 1 ? 2 * shared_bytes",
        "(kRowWarps == 1 ? 1 * shared_bytes",
    ),
    # ---- vectors
    Mutant(
        "vector: half of a dot product",
        "compute_vector.cuh",
        "for (int o = kKeys; o < 32; o *= 2)",
        "for (int o = kKeys; o < 16; o *= 2)",
    ),
    Mutant(
        "vector: weights read before they are written",
        "compute_vector.cuh",
        "    __syncwarp();\n    const bool split",
        "    const bool split",
        first="tsan",
    ),
    Mutant(
        "vector: NaN of a hidden key comes through",
        "compute_vector.cuh",
        "          if (split && !(seen[r] >> x & 1)) continue;\n",
        "",
    ),
    Mutant(
        "vector: shuffle among too few lanes",
        "compute_vector.cuh",
        "if (lane() < kKeys) weights_",
        "if (lane() < kKeys - 1) weights_",
    ),
    # ---- append
    Mutant(
        "append: one slot too far",
        "append.cu",
        "const int slot = length + t,",
        "const int slot = length + t + 1,",
    ),
    Mutant(
        "append: a full cache is not refused",
        "append.cu",
        "length <= p.capacity - p.tokens,",
        "length <= p.capacity,",
        "append",
    ),
    Mutant(
        "append: rotation the other way",
        "append.cu",
        "x * cos[i] + other * sin[i] : x",
        "x * cos[i] - other * sin[i] : x",
        "append",
    ),
    Mutant(
        "append: the scale of one lane",
        "append.cu",
        "  largest = max_lanes<32>(largest);\n",
        "",
        "append or rounding",
    ),
    Mutant(
        "append: infinity passes for a number",
        "append.cu",
        "    spoilt += x * 0.f;\n",
        "",
        "rounding",
    ),
    # ---- append and attend in one call
    Mutant(
        "extend: new tokens are not attended to",
        "work.cuh",
        "w.length = held + p.added;",
        "w.length = held;",
        "extend or append or splits",
    ),
    Mutant(
        "extend: nothing is appended",
        "operators.cpp",
        "  if (append) append->run(device);\n",
        "",
        "append or splits",
    ),
    Mutant(
        "extend: queries all stand behind one another",
        "append.cu",
        "length + t * p.query_step",
        "length + t",
        "append",
    ),
    Mutant(
        "extend: queries of too few heads are rotated",
        "append.cu",
        "heads = is_query ? p.q_heads : p.heads;",
        "heads = p.heads;",
        "append",
    ),
    Mutant(
        "extend: the first query is taken for a token",
        "append.cu",
        "is_query = item >= tokens;",
        "is_query = item > tokens;",
        "append",
    ),
    Mutant(
        "rotary: a position beyond the tables is read",
        "append.cu",
        "ATTNKIT_REQUIRE(position < p.positions,",
        "ATTNKIT_REQUIRE(true,",
        "refuses",
    ),
    # ---- launches and memory
    Mutant(
        "launch: shared memory is not asked for",
        "device.cuh",
        "if (!(told.load(std::memory_order_relaxed) & bit)) {",
        "if (false) {",
    ),
    Mutant(
        "memory: what is misaligned is not copied",
        "operators.cpp",
        "  if (aligned(t, array_of(t, name))) return t;",
        "  return t;",
        "misaligned",
    ),
    Mutant(
        "memory: where a tensor starts is not looked at",
        "operators.cpp",
        "t.stride(3) == 1 && reinterpret_cast<uintptr_t>(a.data) % 16 == 0;",
        "t.stride(3) == 1;",
        "misaligned",
    ),
]


class Planted:
    """The kernels with a bug, or without any, in a folder of their own."""

    def __init__(
        self, folder: Path, mutant: Mutant | None = None, clean: Planted | None = None
    ) -> None:
        self.folder, self.clean = folder, clean
        self.lock = threading.Lock()
        shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("cpu"))
        (folder / "csrc" / "cuda" / "few.cu").write_text(FEW)
        self.file = None if mutant is None else folder / "csrc" / "cuda" / mutant.file
        if self.file is not None and mutant is not None:
            self.file.write_text(self.file.read_text().replace(mutant.old, mutant.new))

    def object(self, variant: str, name: str) -> Path:
        """Of one source; that of the clean kernels, if it does not include what has the bug."""
        with self.lock:
            if self.clean is not None and self.file is not None:
                usual = self.clean.object(variant, name)
                if self.file.name not in re.findall(r"[\w.]+", usual.with_suffix(".d").read_text()):
                    return usual
            builder = build.Builder(variant, self.folder, self.folder / variant)
            flags = [*builder.kernel_flags(), ONE_DIM]
            return builder.compile(self.folder / "csrc" / "cuda" / f"{name}.cu", flags)

    def library(self, variant: str) -> Path:
        """What is not compiled here is that of the tests' own build."""
        base, plain = build.Builder(variant), build.Builder("plain")
        objects = [self.object(variant, name) for name in SOURCES]
        objects += [base.folder / f"{name}.o" for name in build.RUNTIME]
        if self.file is not None and self.file.name == "operators.cpp":
            plain = build.Builder("plain", self.folder, self.folder / "operators")
            plain.operators()
        own = build.Builder(variant, self.folder, self.folder / variant)
        objects.append(plain.folder / "operators.o")
        return own.link(own.folder / "kernels.so", objects, own.library_flags())


def run_tests(library: Path, variant: str, words: str) -> str:
    """By what the tests, or a sanitizer in them, noticed something; empty if nothing was."""
    preload = ""
    if variant != "plain":
        names = (f"lib{variant}.so", "libstdc++.so")
        preload = " ".join(
            subprocess.run([*build.compiler().split(), f"-print-file-name={name}"],
                           capture_output=True, text=True).stdout.strip() for name in names
        )  # fmt: skip
    environment = {
        **os.environ,
        "CUDA_EMULATOR": variant,
        "CUDA_EMULATOR_LIBRARY": str(library),
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
        "OMP_NUM_THREADS": "1",
    }
    chosen = f"emulated and ({words})" if words else "emulated"
    # -s: or a sanitizer's report would go with the output that is captured
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider",
               "--tb=short", "-k", chosen, *TESTS]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return "a time limit"
    said = done.stdout + done.stderr
    if done.returncode == 0:
        return ""
    # the first line of a kernel in the report: a copy's own place is in the emulator
    if found := re.search(r"Sanitizer: (data race|[\w-]+).*?(\w+\.cuh?:\d+)", said, re.S):
        return f"{found[1]} at {found[2]}"
    if found := re.search(r"(\w+\.cuh?:\d+):\d+: runtime error: (.{0,60})", said):
        return f"{found[2]} at {found[1]}"
    if found := re.search(r"^FAILED \S+::(\S+)(?: - (.*))?$", said, re.M):
        return f"{found[1]}: {(found[2] or '')[:70]}"
    return f"exit {done.returncode}"


def caught(mutant: Mutant, clean: Planted) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory(prefix="attnkit-cuda-mutant-") as name:
        planted = Planted(Path(name), mutant, clean)
        for variant in sorted(build.SANITIZERS, key=lambda name: name != mutant.first):
            noticed = run_tests(planted.library(variant), variant, mutant.tests)
            if noticed:
                return True, f"{variant}: {noticed}"
    return False, ""


def stale(mutants: list[Mutant]) -> list[str]:
    found = []
    for mutant in mutants:
        count = (ROOT / "csrc" / "cuda" / mutant.file).read_text().count(mutant.old)
        if count != 1:
            found.append(f"{mutant.label}: {count} times in {mutant.file}: {mutant.old!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose label holds one of these")
    parser.add_argument("--list", action="store_true", help="print the labels and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trust", action="store_true", help="do not test without any bug first")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in m.label for w in options.words)]
    if options.list:
        print(*(m.label for m in chosen), sep="\n")
        return 0
    reason = build.obstacle()
    if reason:
        print(f"nothing was planted: {reason}")
        return 0
    if wrong := stale(chosen):
        print("cannot be planted:", *wrong, sep="\n  ")
        return 2
    start = time.monotonic()
    for variant in build.SANITIZERS:
        build.Builder(variant).kernels()
    survivors = 0
    with (
        tempfile.TemporaryDirectory(prefix="attnkit-cuda-mutant-") as name,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        clean = Planted(Path(name, "clean"))
        for variant in () if options.trust else build.SANITIZERS:
            if noticed := run_tests(clean.library(variant), variant, ""):
                print(f"without any bug: {variant}: {noticed}")
                return 2
        if not options.trust:
            print(f"without any bug nothing is noticed ({time.monotonic() - start:.0f} s)")
        results = pool.map(lambda mutant: caught(mutant, clean), chosen)
        for mutant, (found, how) in zip(chosen, results, strict=True):
            print(f"{'caught' if found else 'MISSED'}  {mutant.label}  [{how}]", flush=True)
            survivors += not found
    total = len(chosen)
    print(f"{total - survivors} of {total} caught ({time.monotonic() - start:.0f} s)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
