"""Plants bugs in the C++ kernels, one at a time, and wants the tests to catch every one.

    python tests/mutants.py [words of labels...] [--list] [--jobs N]

Each mutant of planted_bugs.py is one replacement in csrc/cpu, compiled for the portable vectors
alone (the files of other instruction sets hold the same kernels) into a copy of the package, on
which the tests that are named beside it then run.  Exits with 1 if one survives, with 2 if the
tests fail without any bug, or if a text to replace is not there once.
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

from planted_bugs import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds for the tests of one mutant: a bug may well hang

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
        if mutant.file.endswith(".inl"):
            sources = {f"isa_{mutant.isa}", "isa_portable"}  # which holds float64 for all
        elif mutant.file == "call.h":
            sources = {"operators", "cache_operators"}
        else:
            sources = {mutant.file.removesuffix(".cpp")}
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
