"""Reads the machine code of the CPU kernels: no hot loop may spill a vector to the stack.

    python bench/machine_code_cpu.py [library]

Disassembles the extension (attnkit._C unless a library is named) and finds the hot loops by what
they consist of: innermost loops that add products (fused multiply-adds, pairs of bfloat16, tiles,
or multiplications and additions where there is nothing better) to registers that nothing else in
the loop writes.  Prints for each how many instructions it has, how many are products, how many
registers they are summed in, how many vectors it loads, how many constants it finds on the stack
(which costs what finding them elsewhere does), and how many vectors it spills: stores to the stack,
reads from where it stores, or multiplies as they lie there.  Exits with 1 if a loop spills, with 2
if an instruction set lacks a loop that it must have, and with 0 and a reason where nothing can be
disassembled.
"""

from __future__ import annotations

import argparse
import bisect
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# The functions that are looked at.  `wide` and `wide_tiles` are for tests, not for speed.
FUNCTION = re.compile(r"attnkit::(\w+)::(Forward|Backward|Decode)<(.*?)>+::(\w+)")
INSTRUCTION_SETS = {"portable", "avx2", "avx512", "avx512_bf16", "amx"}
FEWEST_SUMS = 6  # registers; no polynomial has so many
# 16-byte vectors have no instruction for float16: it is converted one value at a time, in memory.
THROUGH_MEMORY = re.compile(r"portable Decode<From(Fp16|Fp8)>")

LINE = re.compile(r"^\s*([0-9a-f]+):\t(\S+)\s*(.*)$")
HEADER = re.compile(r"^[0-9a-f]+ <(.*)>:$")
VECTOR = re.compile(r"%[xyz]mm\d|%tmm\d")
MEMORY = re.compile(r"(?:-?0x[0-9a-f]+)?\((%\w+)?(?:,%\w+,\d)?\)")
PRODUCT = re.compile(r"^(vfn?m(add|sub)\w+p[sd]|vdpbf16ps|tdpbf16ps)$")
PLAIN_PRODUCT = re.compile(r"^mulp[sd]$")
PLAIN_SUM = re.compile(r"^addp[sd]$")
READS_ONLY = re.compile(r"^(v?u?comis[sd]|v?p?tests?\w*|test|cmp\w*|j\w+|push|prefetch\w+)$")
JUMP = re.compile(r"^j\w+$")


class Instruction(NamedTuple):
    at: int
    name: str
    operands: str


class Loop(NamedTuple):
    """An innermost loop, and what it consists of."""

    isa: str
    where: str  # kernel, operand type, function
    at: int
    instructions: int
    products: int
    sums: int  # registers, or tiles
    loads: int
    constants: int
    spills: int


def functions(lines: Iterable[str]) -> Iterator[tuple[str, list[Instruction]]]:
    """The functions of a disassembly: demangled name, instructions."""
    name, body = "", []
    for line in lines:
        if header := HEADER.match(line):
            if body:
                yield name, body
            name, body = header[1], []
        elif found := LINE.match(line):
            body.append(Instruction(int(found[1], 16), found[2], found[3].split("#")[0].strip()))
    if body:
        yield name, body


def innermost_loops(body: list[Instruction]) -> Iterator[list[Instruction]]:
    """Runs of instructions that end in a jump to their start, with no other such run inside."""
    places = [i.at for i in body]
    loops = []
    for index, instruction in enumerate(body):
        target = instruction.operands.split(" ")[0]
        if not JUMP.match(instruction.name) or not re.fullmatch("[0-9a-f]+", target):
            continue
        start = bisect.bisect_left(places, int(target, 16))
        if start <= index and places[start] == int(target, 16):
            loops.append((start, index))
    for start, end in loops:
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops):
            yield body[start : end + 1]


def describe(isa: str, where: str, loop: list[Instruction], frame: bool) -> Loop:
    """Count the instructions of one loop; `frame`: %rbp points to the stack."""
    plain = isa == "portable"  # a product is a multiplication, then an addition
    products = loads = 0
    summed, written, stored = set(), set(), set()
    read = []  # places on the stack, and whether a product is what reads them
    for _, name, operands in loop:
        memory = MEMORY.search(operands)
        to = operands.split(",")[-1].split("{")[0]
        product = PRODUCT.match(name) or (plain and PLAIN_PRODUCT.match(name))
        products += bool(product)
        if (PLAIN_SUM if plain else PRODUCT).match(name):
            summed.add(to)
        elif VECTOR.match(to) and not READS_ONLY.match(name):
            written.add(to)
        if not memory or not VECTOR.search(operands):
            continue
        destination = memory.end() == len(operands)
        if memory[1] == "%rsp" or (frame and memory[1] == "%rbp"):
            if destination:
                stored.add(memory[0])
            else:
                read.append((memory[0], bool(product)))
        elif not destination:
            loads += 1
    spills = len(stored) + sum(place in stored or product for place, product in read)
    constants = len(stored) + len(read) - spills
    tiles = sum(name == "tdpbf16ps" for _, name, _ in loop)
    sums = max(len(summed - written), tiles)
    return Loop(isa, where, loop[0].at, len(loop), products, sums, loads, constants, spills)


def hot_loops(lines: Iterable[str]) -> list[Loop]:
    """The loops of the kernels' functions in which products are summed."""
    found = []
    for name, body in functions(lines):
        match = FUNCTION.search(name)
        if not match or name.endswith("@plt") or match[1] not in INSTRUCTION_SETS:
            continue
        isa, kernel, operand, function = match.groups()
        where = f"{kernel}<{operand.split('::')[-1]}>::{function}"
        frame = any(i.name == "mov" and i.operands == "%rsp,%rbp" for i in body[:12])
        for run in innermost_loops(body):
            loop = describe(isa, where, run, frame)
            tiled = any(i.name == "tdpbf16ps" for i in run)
            if loop.sums >= FEWEST_SUMS or tiled:
                found.append(loop)
    return found


def missing(loops: list[Loop]) -> list[str]:
    """Kernels of which no hot loop was found, so that nothing is known of them."""
    seen = {(x.isa, x.where.split("<")[0]) for x in loops}
    wanted = {(isa, kernel) for isa, _ in seen for kernel in ("Forward", "Backward", "Decode")}
    return [f"{kernel} of {isa}" for isa, kernel in sorted(wanted - seen)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="?", help="a built extension (default: attnkit._C)")
    options = parser.parse_args()
    if platform.machine() != "x86_64":
        print(f"machine code: skipped, {platform.machine()} is not read")
        return 0
    if not shutil.which("objdump"):
        print("machine code: skipped, there is no objdump")
        return 0
    library = options.library
    if library is None:
        spec = importlib.util.find_spec("attnkit._C")
        if spec is None or spec.origin is None:
            print("machine code: skipped, the extension is not built")
            return 0
        library = spec.origin
    command = ["objdump", "-d", "--no-show-raw-insn", "-C", library]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        loops = hot_loops(process.stdout)
    loops = [x for x in loops if not THROUGH_MEMORY.match(f"{x.isa} {x.where}")]
    heads = "instr. products sums loads constants spills"
    print(f"{'instruction set':16}{'loop':42}{'address':>9} {heads}")
    for x in sorted(loops):
        shown = f"{x.instructions:6} {x.products:8} {x.sums:4} {x.loads:5}"
        shown += f" {x.constants:9} {x.spills:6}"
        print(f"{x.isa:16}{x.where:42}{x.at:9x} {shown}{'  SPILLS' if x.spills else ''}")
    spilling = sum(x.spills > 0 for x in loops)
    print(f"{len(loops)} hot loops, {spilling} of them spill")
    if not loops or missing(loops):
        print("not found:", ", ".join(missing(loops)) or "any loop")
        return 2
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
