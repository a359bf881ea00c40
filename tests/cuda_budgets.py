"""Compiles every CUDA kernel for some architectures and holds it to its budget; needs no GPU.

    python tests/cuda_budgets.py [--write] [--archs 80,90a,100] [--jobs N] [files ...]
    python tests/cuda_budgets.py [--write] --log build/cuda/build.log

With --log it compiles nothing: it reads what ptxas said in builds of the extension, last word last.

Per kernel: registers, bytes spilled, shared memory, blocks that a multiprocessor has room for (by
NVIDIA's cuda_occupancy.h), and bytes on their way to it: for each of these blocks what it loads
while it uses a tile, which is another tile, or two of 8 bits.  Little's law asks for bandwidth x
latency of these; the bound is 1.2 times that, with 700 ns, of an A100 (2039 GB/s, 108 SMs) for
sm_80, of an H100 (3350 GB/s, 132 SMs) and an H200 (4800 GB/s, 132 SMs) for the others.

Exits with 1 where a kernel is missing, spills, has fewer bytes on their way, or is above its budget
in tests/cuda_budgets.tsv, if it has one there; --write makes them from what was found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "cuda"
BUDGETS = ROOT / "tests" / "cuda_budgets.tsv"
MACHINES = {"A100": (2039e9, 108), "H100": (3350e9, 132), "H200": (4800e9, 132)}
LATENCY, MARGIN = 700e-9, 1.2


class Launch(NamedTuple):
    """What a kernel's launch asks for."""

    threads: int
    shared: int
    tile_bytes: int  # 0: it loads no tiles


class Compiled(NamedTuple):
    registers: int
    spilled: int  # bytes, stores and loads


class Row(NamedTuple):
    kernel: str
    arch: str
    registers: int
    spilled: int
    shared: int
    blocks: int
    in_flight: int


def needed(machine: str) -> float:
    """Bytes that have to be on their way to each multiprocessor."""
    bandwidth, multiprocessors = MACHINES[machine]
    return MARGIN * bandwidth * LATENCY / multiprocessors


def compiled(source: Path, arch: str, folder: Path) -> dict[tuple[str, str], Compiled]:
    """What ptxas says of the kernels of a source."""
    command = ["nvcc", "-std=c++20", "-O3", "-Xptxas=-v", "-cubin",
               f"-gencode=arch=compute_{arch},code=sm_{arch}", str(source),
               "-o", str(folder / f"{source.stem}.{arch}.cubin")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return told(done.stderr)


def told(text: str) -> dict[tuple[str, str], Compiled]:
    """By kernel and architecture, what ptxas said in `text`."""
    found = {}
    key, spilled = ("", ""), 0
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line):
            key, spilled = (match[1], match[2]), 0
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match[1]) + int(match[2])
        elif (match := re.search(r"Used (\d+) registers", line)) and key[0]:
            found[key], key = Compiled(int(match[1]), spilled), ("", "")
    return found


def demangled(names: list[str]) -> list[str]:
    """attnkit::cuda::decode_kernel<X>(...) as X, others by their own name."""
    done = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True)
    short = []
    for line in done.stdout.splitlines():
        inner = re.search(r"decode_kernel<(.*)>\(", line)
        plain = re.search(r"(\w+)\(attnkit", line)
        short.append(inner[1].strip() if inner else plain[1] if plain else line)
    return [name.replace(" >", ">") for name in short]


def launches() -> tuple[Path, dict[str, Launch]]:
    """The program that knows the kernels' launches, and what it says."""
    build = ROOT / "tests" / "cuda_emulator" / "build.py"
    done = subprocess.run([sys.executable, build, "table", "plain"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    program = Path(done.stdout.strip())
    found = {}
    for line in subprocess.run([program], capture_output=True, text=True).stdout.splitlines():
        name, *numbers = line.split("\t")
        found[name.replace(" >", ">")] = Launch(*map(int, numbers))
    return program, found


def compile_all(
    archs: list[str], sources: list[Path], jobs: int
) -> dict[tuple[str, str], Compiled]:
    work = [(source, arch) for source in sources for arch in archs]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        done = pool.map(lambda job: compiled(*job, Path(name)), work)
        return {key: result for found in done for key, result in found.items()}


def absent(rows: list[Row], archs: list[str]) -> list[str]:
    """Kernels that the sources have and `rows` have not."""
    there = {row[:2] for row in rows}
    names = [name.replace("attnkit::cuda::", "") for name in launches()[1]]
    return [f"{name} sm_{arch}" for name in names for arch in archs if (name, arch) not in there]


def measure(found: dict[tuple[str, str], Compiled]) -> list[Row]:
    program, known = launches()
    rows, questions = [], []
    names = demangled([mangled for mangled, _ in found])
    for kernel, (_, arch), result in zip(names, found, found.values(), strict=True):
        launch = known.get(kernel, Launch(128, 1024, 0))
        rows.append((kernel.replace("attnkit::cuda::", ""), arch, result, launch))
        number = re.sub(r"\D", "", arch)
        questions += [str(result.registers), str(launch.threads), str(launch.shared), number]
    said = subprocess.run([program, *questions], capture_output=True, text=True, check=True)
    blocks = map(int, said.stdout.split())
    return sorted(
        Row(kernel, arch, *result, launch.shared, n, n * launch.tile_bytes)
        for (kernel, arch, result, launch), n in zip(rows, blocks, strict=True)
    )


def complaints(row: Row, budgets: dict[tuple[str, str], Row]) -> list[str]:
    budget = budgets.get(row[:2])
    wrong = [f"spills {row.spilled} bytes"] if row.spilled else []
    wrong += [
        f"{row.in_flight} bytes on their way, {machine} asks for {needed(machine):.0f}"
        for machine in (["A100"] if row.arch == "80" else ["H100", "H200"])
        if row.in_flight and row.in_flight < needed(machine)
    ]
    if budget is None:  # held to spills and bytes alone, until --write makes one
        return wrong
    wrong += [
        f"{name} {getattr(row, name)}, its budget is {getattr(budget, name)}"
        for name in ("registers", "shared")
        if getattr(row, name) > getattr(budget, name)
    ]
    if row.blocks < budget.blocks:
        wrong.append(f"{row.blocks} blocks, its budget is {budget.blocks}")
    return wrong


def read_budgets() -> dict[tuple[str, str], Row]:
    if not BUDGETS.exists():
        return {}
    lines = [line.split("\t") for line in BUDGETS.read_text().splitlines()[1:]]
    rows = [Row(*line[:2], *map(int, line[2:])) for line in lines]
    return {row[:2]: row for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="*", type=Path, help="of csrc/cuda; all of them if none is named"
    )
    parser.add_argument("--archs", default="80,90a,100")
    parser.add_argument(
        "--jobs", type=int, default=int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
    )
    parser.add_argument("--log", type=Path, help="of a build of the extension, to be read instead")
    parser.add_argument("--write", action="store_true", help="make the budgets from what is found")
    options = parser.parse_args()
    if options.log is not None:
        found = told(options.log.read_text())
    elif shutil.which("nvcc") is None:
        print("there is no nvcc: nothing was compiled")
        return 0
    else:
        sources = options.files or sorted(SOURCES.glob("*.cu"))
        found = compile_all(options.archs.split(","), sources, options.jobs)
    rows = measure(found)
    if options.write:
        kept = read_budgets() | {row[:2]: row for row in rows}
        lines = ["\t".join(Row._fields), *("\t".join(map(str, kept[key])) for key in sorted(kept))]
        BUDGETS.write_text("\n".join(lines) + "\n")
    budgets, bad = read_budgets(), 0
    shown = "{:52} {:>4} {:>4} {:>5} {:>7} {:>6} {:>5} {:>9}  {}"
    heads = ("kernel", "sm", "regs", "spill", "shared", "blocks", "warps", "in flight", "")
    print(shown.format(*heads))
    for row in rows:
        wrong = complaints(row, budgets)
        bad += bool(wrong)
        print(
            shown.format(
                *row[:6],
                4 * row.blocks,
                row.in_flight,
                "; ".join(wrong) or ("ok" if row[:2] in budgets else "ok, without a budget"),
            )
        )
    if not options.files and (missing := absent(rows, options.archs.split(","))):
        print(f"not compiled: {', '.join(missing)}")
        bad += len(missing)
    asked = ", ".join(f"{name} {needed(name):.0f}" for name in MACHINES)
    print(
        f"{len(rows)} kernels, {bad} missing or above budget; bytes asked for on their way: {asked}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
