"""Plants bugs in the C++ kernels, one at a time, and wants the tests to catch every one.

    python tests/mutants.py [words of labels...] [--list] [--jobs N]

Each mutant is one replacement in csrc/cpu, compiled for the portable vectors alone (the files of
other instruction sets hold the same kernels) into a copy of the package, on which the tests that
are named beside it then run.  Exits with 1 if one survives, with 2 if the tests fail without any
bug, or if a text to replace is not there once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds for the tests of one mutant: a bug may well hang


class Mutant(NamedTuple):
    label: str
    file: str  # in csrc/cpu
    old: str  # stands there once
    new: str
    tests: str  # files tests/test_<word>.py, the likeliest first
    isa: str = "portable"


MUTANTS = [
    # ---- masks
    Mutant(
        "band: right edge off by one",
        "scores.inl",
        "return lesser(s_.lk, i_end - 1 + s_.hi + 1);",
        "return lesser(s_.lk, i_end - 1 + s_.hi + 2);",
        "forward",
    ),
    Mutant(
        "band: left edge off by one",
        "scores.inl",
        "return greater<int64_t>(0, i + s_.lo);",
        "return greater<int64_t>(0, i + s_.lo + 1);",
        "forward",
    ),
    Mutant(
        "band: first query of a key off by one",
        "scores.inl",
        "return greater<int64_t>(0, j - s_.hi);",
        "return greater<int64_t>(0, j - s_.hi + 1);",
        "backward",
    ),
    Mutant(
        "band: boundary tiles taken for whole ones",
        "scores.inl",
        "j_end - 1 - i <= s_.hi &&",
        "j - i <= s_.hi &&",
        "forward",
    ),
    Mutant(
        "keep: reversed",
        "scores.inl",
        "x < n && keep_from[x] ? -1 : 0",
        "x < n && !keep_from[x] ? -1 : 0",
        "forward",
    ),
    Mutant(
        "segments: later ones see earlier ones",
        "scores.inl",
        "load_int<T>(line.segment + x) == line.id",
        "load_int<T>(line.segment + x) <= line.id",
        "forward",
    ),
    Mutant(
        "blocks: every head takes those of head 0",
        "operators.cpp",
        "p.block_head = b.size(1) == 1 ? 0 : rows * columns;",
        "p.block_head = 0;",
        "forward",
    ),
    Mutant(
        "bias: -inf does not hide a key that holds NaN",
        "scores.inl",
        "select<T>(b == none, none, v + b);",
        "v + b;",
        "forward",
    ),
    Mutant(
        "bottom-right: offset of the transposed case",
        "operators.cpp",
        "(cache ? s.lk : full) - s.lq : 0",
        "s.lq - (cache ? s.lk : full) : 0",
        "forward",
    ),
    # ---- scores
    Mutant(
        "ALiBi: the alignment is forgotten",
        "scores.inl",
        "first_key(i), last_key(i + 1), i + s_.off}",
        "first_key(i), last_key(i + 1), i}",
        "forward",
    ),
    Mutant(
        "ALiBi: the alignment has the wrong sign in the backward pass",
        "scores.inl",
        "first_query(j), last_query(j + 1), j - s_.off}",
        "first_query(j), last_query(j + 1), j + s_.off}",
        "backward",
    ),
    Mutant(
        "softcap: not multiplied back",
        "scores.inl",
        "v = t * softcap;",
        "v = t;",
        "forward",
    ),
    Mutant(
        "softcap: derivative 1 - t",
        "scores.inl",
        "store(slope + x, 1 - t * t)",
        "store(slope + x, 1 - t)",
        "backward",
    ),
    Mutant(
        "offsets of 32 bits",
        "pack.inl",
        "head * a.head + row * a.row) * bytes_of",
        "static_cast<int32_t>(head * a.head) + row * a.row) * bytes_of",
        "forward",
    ),
    # ---- forward
    Mutant(
        "online softmax: the output is not rescaled",
        "forward.inl",
        "store(o + d, load(o + d) * shrink);",
        "store(o + d, load(o + d));",
        "forward",
    ),
    Mutant(
        "online softmax: the sum is not rescaled",
        "forward.inl",
        "load(t.l + row * kLanes<T>) * shrink);",
        "load(t.l + row * kLanes<T>));",
        "forward",
    ),
    Mutant(
        "tail: the last keys are left out",
        "forward.inl",
        "ceil_to(lesser(g + kGroup, head.last_key(i + n)),",
        "floor_to(lesser(g + kGroup, head.last_key(i + n)),",
        "forward",
    ),
    Mutant(
        "GQA: heads dealt out in turn",
        "forward.inl",
        "at(shared, s, h / group_)",
        "at(shared, s, h % p_.kv_heads)",
        "forward",
    ),
    Mutant(
        "sink: without its share of the sum",
        "forward.inl",
        "l = l * factor + exp2(splat((sink - top) * kLog2e<T>))[0];",
        "l = l * factor;",
        "forward",
    ),
    Mutant(
        "lse: without the maximum",
        "forward.inl",
        ": m + static_cast<T>(log_of(l));",
        ": static_cast<T>(log_of(l));",
        "forward",
    ),
    Mutant(
        "values that are not finite go the fast way",
        "forward.inl",
        "finite &= keys.v_finite[block] != 0;",
        "",
        "forward",
    ),
    Mutant(
        "the path changes with the number of keys that follow",
        "operators.cpp",
        "p.q_rows < p.k_rows && !causal_from_top &&",
        "p.k_rows < 100 &&",
        "determinism",
    ),
    # ---- backward
    Mutant(
        "delta: forgotten",
        "backward.inl",
        "p * (dp - load(queries.delta + x % kBlock))",
        "p * dp",
        "backward",
    ),
    Mutant(
        "delta: the gradient of lse has the wrong sign",
        "pack.inl",
        "return p.dlse ? delta - static_cast",
        "return p.dlse ? delta + static_cast",
        "backward",
    ),
    Mutant(
        "dK: without the scale",
        "backward.inl",
        "pack_rows<Op>(q, kBlock, q_factor_, to.q_rows",
        "pack_rows<Op>(q, kBlock, T{1}, to.q_rows",
        "backward",
    ),
    Mutant(
        "dQ: without the scale",
        "backward.inl",
        "store_row(line[y], columns, static_cast<T>(p_.scale),",
        "store_row(line[y], columns, T{1},",
        "backward",
    ),
    Mutant("dV: weights before dropout", "backward.inl", "kept = t.ds;", "kept = t.p;", "backward"),
    Mutant(
        "dS: dropout forgotten",
        "backward.inl",
        "if (dropout.active) dp *= load(t.drop + x);",
        "",
        "backward",
    ),
    Mutant(
        "dS: NaN of hidden values",
        "backward.inl",
        "ds = select<T>(p == Vec<T>{}, Vec<T>{}, ds);",
        "",
        "backward",
    ),
    Mutant(
        "dQ: NaN of hidden keys", "backward.inl", "if (!t.k_finite) {", "if (false) {", "backward"
    ),
    Mutant(
        "dsinks: wrong sign", "backward.inl", "sink_sum -= exp2", "sink_sum += exp2", "backward"
    ),
    Mutant(
        "rows without keys take part",
        "backward.inl",
        "live[r] = r < n && lse[r] != -kInfinity<T>;",
        "live[r] = r < n;",
        "backward",
    ),
    Mutant(
        "rows with a coarse lse are not summed again",
        "operators.cpp",
        "p.low = low->mutable_data_ptr();",
        "",
        "backward",
    ),
    Mutant(
        "dbias: heads are not summed",
        "bias_gradient.inl",
        "p_.bias_head == 1 ? p_.q_heads : head + 1",
        "head + 1",
        "backward",
    ),
    Mutant(
        "dbias: rows are not summed",
        "bias_gradient.inl",
        "const int64_t r1 = all_rows ? p_.max_lq :",
        "const int64_t r1 = all_rows ? Op::kRows :",
        "backward",
    ),
    Mutant(
        "dbias: dropout forgotten",
        "bias_gradient.inl",
        "store(dp + x, load(dp + x) * load(t.drop + x));",
        ";",
        "dropout",
    ),
    Mutant(
        "gradients past a length stay unwritten",
        "operators.cpp",
        "const bool partly = packed || lengths.has_value();",
        "const bool partly = packed;",
        "backward",
    ),
    Mutant(
        "pairs: one key twice in dQ",
        "backward.inl",
        "load(ds + (m + 1) * kBlock + x + y)",
        "load(ds + m * kBlock + x + y)",
        "backward",
        "wide",
    ),
    Mutant(
        "pairs: scores of the exponential without the scale",
        "forward.inl",
        "t.unit = Op::kPair > 1 && late ? static_cast<T>(p_.scale) : T{1};",
        "t.unit = T{1};",
        "forward",
        "wide",
    ),
    Mutant(
        "pairs: lse without the scale",
        "forward.inl",
        "T m = t.m[row] * t.unit,",
        "T m = t.m[row],",
        "forward",
        "wide",
    ),
    # ---- tiles
    Mutant(
        "tiles: the lower rows are multiplied with the upper ones' place in A",
        "tiles.inl",
        "ATTNKIT_TILE_LOAD(5, a + k + 16 * lda, lda);",
        "ATTNKIT_TILE_LOAD(5, a + k, lda);",
        "forward",
        "wide_tiles",
    ),
    Mutant(
        "tiles: the second panel is the first again",
        "tiles.inl",
        "b + at / kPanel<float> * panel_stride +",
        "b +",
        "forward",
        "wide_tiles",
    ),
    Mutant(
        "tiles: a product begins with what was there",
        "tiles.inl",
        "ATTNKIT_TILE_ZERO(2);",
        "",
        "forward",
        "wide_tiles",
    ),
    Mutant(
        "tiles: a depth that is no multiple of a tile's is not padded",
        "pack.inl",
        "return ceil_to(width, Op::kDepth);",
        "return floor_to(width, Op::kDepth);",
        "forward",
        "wide_tiles",
    ),
    # ---- dropout
    Mutant(
        "dropout: counter off by one",
        "philox.inl",
        "{count(j + at, 4),",
        "{count(j + at + 4, 4),",
        "dropout",
    ),
    Mutant(
        "dropout: heads counted from one",
        "philox.inl",
        "Wide{} + static_cast<uint32_t>(i), Wide{} + head,",
        "Wide{} + static_cast<uint32_t>(i), Wide{} + (head + 1),",
        "dropout",
    ),
    Mutant(
        "dropout: the backward pass counts from its own block",
        "philox.inl",
        "count(i + at, 1)",
        "count(at, 1)",
        "backward",
    ),
    Mutant(
        "dropout: the edge is dropped, too",
        "philox.inl",
        "__builtin_convertvector(x >= threshold, Ints)",
        "__builtin_convertvector(x >= threshold + 256, Ints)",
        "dropout",
    ),
    Mutant(
        "dropout: nothing makes up for what is gone",
        "philox.inl",
        "static_cast<T>(1 / (1 - p.dropout))",
        "T{1}",
        "dropout",
    ),
    # ---- decode
    Mutant(
        "merge: sums of chunks without their weight",
        "decode.inl",
        "l += weight[0] * part.l;",
        "l += part.l;",
        "decode",
    ),
    Mutant(
        "merge: outputs of chunks without their weight",
        "decode.inl",
        "load(line + d) + weight * load(o + d)",
        "load(line + d) + load(o + d)",
        "decode",
    ),
    Mutant(
        "decode: bottom-right counts from the room of the cache",
        "operators.cpp",
        "(cache ? s.lk : full)",
        "full",
        "decode",
    ),
    Mutant(
        "decode: queries and heads mixed up",
        "decode.inl",
        "return kv * group_ + row / p_.max_lq;",
        "return kv * group_ + row % group_;",
        "decode",
    ),
    Mutant(
        "decode: the last dimensions are left out",
        "decode.inl",
        "if (rest)",
        "if (rest > 1)",
        "decode",
    ),
    Mutant(
        "decode: values that are not finite go the fast way",
        "decode.inl",
        "bool careful = !plain && !finite_values(at, n);",
        "bool careful = false;",
        "decode",
    ),
    # ---- caches
    Mutant(
        "paged: a block is not cut at the end of its page",
        "decode.inl",
        "lesser(n, x + size - slot % size);",
        "n;",
        "paged_cache",
    ),
    Mutant(
        "paged: all sequences have the pages of the first",
        "decode.inl",
        "p_.pages.table + sequence * p_.pages.width;",
        "p_.pages.table;",
        "paged_cache",
    ),
    Mutant(
        "paged: pages are looked up without starts",
        "decode.inl",
        "p_.sequence[sequence].k0 + j + x;",
        "j + x;",
        "paged_cache",
    ),
    Mutant(
        "paged: the page behind the last is taken for one",
        "operators.cpp",
        "STD_TORCH_CHECK(0 <= page && page < count_,",
        "STD_TORCH_CHECK(0 <= page && page <= count_,",
        "paged_cache",
    ),
    Mutant(
        "paged: starts do not shorten a sequence",
        "operators.cpp",
        "        s.lk -= s.k0;\n",
        "",
        "paged_cache",
    ),
    Mutant(
        "paged: later rows of a long prompt are aligned as the first",
        "operators.cpp",
        "s.off += step, s.lo += step, s.hi += step;",
        "s.off += step;",
        "paged_cache",
    ),
    Mutant(
        "quantised: values without their scales",
        "decode.inl",
        "if constexpr (kScaled) multiply(at.v_scale, n, score);",
        "",
        "paged_cache",
    ),
    Mutant(
        "quantised: scales of hidden values count",
        "decode.inl",
        "if constexpr (kScaled) rest += at.v_scale[x] * T{0};",
        "",
        "paged_cache",
    ),
    Mutant(
        "quantised: NaN in float8 is a number",
        "quantised.inl",
        "const Half half = (x & 0x80) << 8 | magnitude << 7 | nan;",
        "const Half half = (x & 0x80) << 8 | magnitude << 7;",
        "paged_cache",
    ),
    Mutant(
        "quantised: ties of float8 go up",
        "quantised.inl",
        "bits += 0x7ffff + ((bits >> 20) & 1);",
        "bits += 0x80000;",
        "paged_cache",
    ),
    Mutant(
        "quantised: subnormal numbers of float8 in steps of 2^-10",
        "quantised.inl",
        "const float sum = size + 0x1p14f;",
        "const float sum = size + 0x1p13f;",
        "paged_cache",
    ),
    Mutant(
        "append: keys are rotated as if the cache were empty",
        "append.inl",
        "rotate(slot, line);",
        "rotate(t, line);",
        "paged_cache",
    ),
    Mutant(
        "append: keys turn the other way",
        "append.inl",
        "b * cos[i] + a * sin[i];",
        "b * cos[i] - a * sin[i];",
        "paged_cache",
    ),
    Mutant(
        "append: rows with NaN pass for good ones", "append.inl", " + spoilt;", ";", "paged_cache"
    ),
]

# The kernels of other instruction sets, which nothing calls here, as empty tables.
STUB = """#include "../params.h"
namespace attnkit {
namespace amx { extern const Kernels kKernels; const Kernels kKernels{"amx"}; }
namespace avx512_bf16 { extern const Kernels kKernels; const Kernels kKernels{"avx512_bf16"}; }
namespace avx512 { extern const Kernels kKernels; const Kernels kKernels{"avx512"}; }
namespace avx2 { extern const Kernels kKernels; const Kernels kKernels{"avx2"}; }
}
"""


class Builder:
    """Compiles csrc, quickly: two instruction sets, and per mutant only what it changes."""

    def __init__(self, objects: Path) -> None:
        from torch.utils.cpp_extension import include_paths, library_paths

        self.objects = objects
        self.compiler = os.environ.get("CXX", "c++").split()
        python = sysconfig.get_path("include")
        self.flags = [
            "-O1",
            "-std=c++20",
            "-fno-math-errno",
            "-ffp-contract=fast",
            "-Wno-psabi",
            "-fPIC",
            "-DTORCH_TARGET_VERSION=0x020b000000000000",
            "-DPy_LIMITED_API=0x030A0000",
            *(f"-I{path}" for path in (*include_paths(), python)),
        ]
        self.link = [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch", "-ltorch_cpu"]

    def compile(self, csrc: Path, name: str, to: Path) -> None:
        source = csrc / ("" if name == "registration" else "cpu") / f"{name}.cpp"
        subprocess.run(
            [*self.compiler, *self.flags, "-c", str(source), "-o", str(to / f"{name}.o")],
            check=True,
            capture_output=True,
            text=True,
        )

    def baseline(self, csrc: Path, jobs: int) -> None:
        """All objects without any bug."""
        names = ["registration", *(p.stem for p in (csrc / "cpu").glob("*.cpp"))]
        (csrc / "cpu" / "stub.cpp").write_text(STUB)
        names = [n for n in names if not n.startswith(("isa_a", "stub"))] + ["stub"]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda name: self.compile(csrc, name, self.objects), names))

    def library(self, changed: Path, to: Path) -> None:
        """Link the objects in `changed`, and those of the baseline that are not there."""
        found = {p.name: p for p in self.objects.glob("*.o")} | {
            p.name: p for p in changed.glob("*.o")
        }
        command = [*self.compiler, "-shared", *map(str, found.values()), *self.link, "-o", str(to)]
        subprocess.run(command, check=True, capture_output=True, text=True)


def copy_package(to: Path) -> None:
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "build")
    for folder in ("attnkit", "kernels", "tests", "csrc"):
        shutil.copytree(ROOT / folder, to / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", to)


def run_tests(package: Path, words: str, isa: str) -> tuple[str, str]:
    """("passed" | "failed" | "crashed" | "hung", the first failing test)."""
    files = [f"tests/test_{word}.py" for word in words.split()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "isa",
        "-k",
        "cpu or determinism",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        *files,
    ]
    environment = {**os.environ, "ATTNKIT_CPU_ISA": isa, "MALLOC_PERTURB_": "165"}
    environment |= {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=package, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return "hung", ""
    failed = [line[7:] for line in done.stdout.splitlines() if line.startswith("FAILED ")][:1]
    state = {0: "passed", 1: "failed"}.get(done.returncode, "crashed")
    if state == "crashed":
        failed = [line.strip() for line in done.stderr.splitlines() if "/tests/test_" in line][:1]
    if done.returncode > 1:  # pytest's own errors are not what is looked for here
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
        raise SystemExit(2)
    return state, failed[0].split(" - ")[0] if failed else ""


def try_mutant(builder: Builder, mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests catch it, and how."""
    with tempfile.TemporaryDirectory(prefix="attnkit-mutant-") as name:
        package = Path(name)
        copy_package(package)
        path = package / "csrc" / "cpu" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        source = "operators" if mutant.file == "operators.cpp" else f"isa_{mutant.isa}"
        sources = {source}
        if mutant.file.endswith(".inl"):
            sources.add("isa_portable")  # holds float64 for all
        objects = package / "objects"
        objects.mkdir()
        for one in sorted(sources):
            builder.compile(package / "csrc", one, objects)
        builder.library(objects, package / "attnkit" / "_C.abi3.so")
        state, first = run_tests(package, mutant.tests, mutant.isa)
        return state != "passed", f"{state} {first}".strip()


def stale(mutants: list[Mutant]) -> list[str]:
    found = []
    for mutant in mutants:
        count = (ROOT / "csrc" / "cpu" / mutant.file).read_text().count(mutant.old)
        if count != 1:
            found.append(f"{mutant.label}: {count} times in {mutant.file}: {mutant.old}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose label holds one of these")
    parser.add_argument("--list", action="store_true", help="print the labels and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in m.label for w in options.words)]
    if options.list:
        print(*(m.label for m in chosen), sep="\n")
        return 0
    wrong = stale(chosen)
    if wrong:
        print("cannot be planted:", *wrong, sep="\n  ")
        return 2

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attnkit-mutants-") as name:
        clean = Path(name)
        copy_package(clean)
        (clean / "objects").mkdir()
        builder = Builder(clean / "objects")
        builder.baseline(clean / "csrc", options.jobs)
        builder.library(clean / "objects", clean / "attnkit" / "_C.abi3.so")
        for isa in sorted({m.isa for m in chosen}):
            words = " ".join(
                dict.fromkeys(w for m in chosen if m.isa == isa for w in m.tests.split())
            )
            state, first = run_tests(clean, words, isa)
            if state != "passed":
                print(f"without any bug the tests of {isa} {state}: {first}")
                return 2
        print(f"without any bug the tests pass ({time.monotonic() - start:.0f} s)", flush=True)

        survivors = []
        with ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda m: try_mutant(builder, m), chosen)
            for mutant, (caught, how) in zip(chosen, results, strict=True):
                print(f"{'caught' if caught else 'MISSED':6}  {mutant.label}  [{how}]", flush=True)
                if not caught:
                    survivors.append(mutant.label)
    count = len(chosen)
    print(f"{count - len(survivors)} of {count} caught ({time.monotonic() - start:.0f} s)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
