"""Reads the machine code of a GPU kernel: registers, spills, the work of its loops, a speed bound.

compile_matrix.py compiles attnkit's kernels for it.  No GPU is needed: Triton compiles for one that
is not there, and nvdisasm and cuobjdump come with it.
What it shows is not a time.  Per iteration of the hottest loop of one thread block of W warps, in
clocks of one multiprocessor, counts being per warp:

    mma    FLOP / rate of the tensor cores
    mufu   32 W n / 16      exponentials
    fp32   32 W n / rate    additions, products
    alu    32 W n / 64      comparisons, conversions, integers
    issue  W n / 4          every instruction: four schedulers
    smem   bytes through shared memory / 128
    l2     bytes from global memory / (5120 / multiprocessors)
    soft   the longest of mufu, fp32, alu, shuffles, issue without matrix instructions

    overlapped  FLOP / max(mma, soft, issue, smem, l2)              all of it at once
    serial      FLOP / max(mma + soft, smem, l2)                    softmax, then products
    resident    FLOP / max(as overlapped, (mma + soft) / streams)   streams: blocks that fit a
                multiprocessor, times the warpgroups of each if no barrier in the loop joins them

each times clock and number of multiprocessors.  They rank configurations of one machine.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Machine(NamedTuple):
    """What the model knows of a GPU; rates per clock and multiprocessor, clock of the datasheet."""

    part: str
    count: int  # of multiprocessors
    ghz: float
    mma: int  # FLOP in 16 bits
    fp32: int
    shared: int  # KiB
    warps: int
    blocks: int


MACHINES = {
    80: Machine("A100", 108, 1.410, 2048, 64, 164, 64, 32),
    89: Machine("L40S", 142, 2.520, 1024, 128, 100, 48, 24),
    90: Machine("H100", 132, 1.755, 4096, 128, 228, 64, 32),
    100: Machine("B200", 148, 1.850, 8192, 128, 228, 64, 32),
}

_LABEL = re.compile(r"^(\.L_\w+|\.text\.\w+):")
_LINE = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s*(?:/\*.*)?$"
)
_MMA = re.compile(r"(HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|DMMA|UTC[A-Z]*MMA)\b")
_FP32 = re.compile(r"(FFMA|FMUL|FADD|HFMA2|HADD2|HMUL2)(2?)\b")
_ALU = re.compile(
    r"(FMNMX3?|FSEL|FSETP|FSET|F2FP|F2F|F2I|I2F|I2FP|IADD3?|ISETP|LOP3|PLOP3|SHF|SEL|PRMT|LEA|IMNMX|"
    r"VIMNMX3?|IABS|SGXT|MOV|POPC|FLO|BMSK|VIADD|IMAD|HMNMX2|P2R|R2P|FCHK|VIADDMNMX|HSETP2)\b"
)
_JUMP = re.compile(r"(BRA|BRX|JMP)\b")
_LEAVES = re.compile(r"(BRA|BRX|JMP|EXIT|RET|BSYNC|BREAK)\b")
_HMMA_SHAPES = {
    "16816": 16 * 8 * 16,
    "1688": 16 * 8 * 8,
    "16832": 16 * 8 * 32,
    "16864": 16 * 8 * 64,
}
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass
class Instruction:
    """One line of disassembly."""

    address: int
    predicate: str
    name: str
    operands: str

    def bytes_per_lane(self) -> int:
        """What one lane loads or stores."""
        async_copy = self.name.startswith("LDGSTS")
        pattern = r"\.(128|64)\b" if async_copy else r"\.(128|64|U8|S8|U16|S16)\b"
        found = re.search(pattern, self.name)
        return _WIDTHS[found.group(1)] if found else 4


@dataclass
class Loop:
    """One innermost loop and what the model says of it; TFLOP/s."""

    instructions: int
    counts: Counter
    clocks: dict[str, float]
    overlapped: float
    resident: float
    serial: float
    spills: int  # loads and stores of spilled registers


@dataclass
class Report:
    """What a compiled kernel needs and does."""

    registers: int
    stack: int
    shared: int  # bytes
    blocks: int  # that fit one multiprocessor
    spills: int  # instructions, anywhere
    loops: list[Loop] = field(default_factory=list)  # with matrix products; the best bound first

    @property
    def hot(self) -> Loop:
        """The loop over tiles without masks: the one with the best bound."""
        return self.loops[0]


# ------------------------------------------------------------- loops


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of one kernel, and the index that each label stands before."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            labels[label.group(1)] = len(code)
            continue
        found = _LINE.match(line)
        if found:
            address, predicate, name, operands = found.groups()
            code.append(Instruction(int(address, 16), (predicate or "").strip(), name, operands))
    return code, labels


def _blocks(
    code: list[Instruction], labels: dict[str, int]
) -> tuple[list[tuple[int, int]], list[set[int]]]:
    """Basic blocks as (first, one past the last), and the blocks that each may go on to."""
    n = len(code)
    starts = {0, *(i for i in labels.values() if i < n)}
    starts |= {i + 1 for i, s in enumerate(code) if _LEAVES.match(s.name) and i + 1 < n}
    order = sorted(starts)
    number = {start: k for k, start in enumerate(order)}
    spans = list(zip(order, [*order[1:], n], strict=True))
    reconverge: dict[str, str] = {}
    after: list[set[int]] = []
    for k, (first, end) in enumerate(spans):
        for s in code[first:end]:
            target = re.search(r"\.L_\w+", s.operands)
            if s.name.startswith("BSSY") and target:
                reconverge[s.operands.split(",")[0]] = target.group(0)
        last = code[end - 1]
        to: set[int] = set()
        always = not last.predicate and not re.search(r"(^|\s)!?U?P\d", last.operands)
        if _JUMP.match(last.name):
            targets = re.findall(r"\.L_\w+", last.operands)
            to = {number[labels[t]] for t in targets if labels.get(t, n) < n}
        elif last.name.startswith("BSYNC") and last.operands in reconverge:
            at = labels.get(reconverge[last.operands], n)
            to, always = ({number[at]} if at < n else set()), True
        elif not re.match(r"(EXIT|RET)\b", last.name):
            always = False
        if (not always or last.name.startswith("BRX")) and end < n:
            to.add(k + 1)
        after.append(to)
    return spans, after


def natural_loops(code: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """Indices of the instructions of each loop of the control-flow graph, in order.

    A loop is what can reach an edge back to a block that dominates it (so that a wait that was
    moved out of line and jumps back in does not count as one).
    """
    spans, after = _blocks(code, labels)
    before: list[set[int]] = [set() for _ in spans]
    for k, to in enumerate(after):
        for t in to:
            before[t].add(k)
    entries = {k for k in range(len(spans)) if k == 0 or not before[k]}
    everything = (1 << len(spans)) - 1
    dominators = [1 << k if k in entries else everything for k in range(len(spans))]
    changed = True
    while changed:
        changed = False
        for k in range(len(spans)):
            if k in entries:
                continue
            common = everything
            for p in before[k]:
                common &= dominators[p]
            common |= 1 << k
            changed |= common != dominators[k]
            dominators[k] = common
    bodies: dict[int, set[int]] = {}
    for k, to in enumerate(after):
        for head in to:
            if dominators[k] >> head & 1:
                body, open_blocks = {head}, [k]
                while open_blocks:
                    at = open_blocks.pop()
                    if at not in body:
                        body.add(at)
                        open_blocks.extend(before[at])
                bodies.setdefault(head, set()).update(body)
    return [sorted(i for k in body for i in range(*spans[k])) for _, body in sorted(bodies.items())]


# ------------------------------------------------------------- counting


def _matrix_work(s: Instruction) -> tuple[float, float]:
    """(FLOP per warp, bytes of operands from shared memory per warp) of a matrix instruction."""
    shape = re.search(r"\.(?:SP\.)?(\d+)x(\d+)x(\d+)", s.name)
    if shape:  # of a warpgroup: four warps share it; every shape reads 32 bytes along k
        m, n, k = map(int, shape.groups())
        in_registers = re.match(r"R\d+, R\d+, gdesc", s.operands)
        return 2 * m * n * k / 4, (n + (0 if in_registers else m)) * 32 / 4
    shape = re.search(r"\.(16816|1688|16832|16864)\b", s.name)
    return (2.0 * _HMMA_SHAPES[shape.group(1)] if shape else 0.0), 0.0


def count(body: list[Instruction]) -> Counter:
    """What one warp does in the instructions."""
    c: Counter = Counter()
    for s in body:
        if s.name == "NOP" or (s.predicate.endswith("PT") and s.name == "LDS"):
            continue  # also the load that never happens, which ptxas puts in to wait
        c["all"] += 1
        if _MMA.match(s.name):
            flop, operands = _matrix_work(s)
            c["mma"] += 1
            c["hgmma"] += s.name.startswith("HGMMA")
            c["flop"] += flop
            c["operand bytes"] += operands
            c["eight bit"] += s.name[0] in "QI"
        elif s.name.startswith("MUFU"):
            c["mufu"] += 1
        elif _FP32.match(s.name):
            pair = _FP32.match(s.name).group(2) and s.name[0] == "F"
            c["fp32"] += 2 if pair else 1
        elif _ALU.match(s.name):
            c["alu"] += 1
        elif s.name.startswith("LDGSTS") or re.match(r"LDG|LD\.E|LDE", s.name):
            c["global bytes"] += 32 * s.bytes_per_lane()
        elif re.match(r"UTMALDG|UBLKCP", s.name):
            c["tma"] += 1
        elif re.match(r"LDL|STL", s.name):
            c["spill"] += 1
        elif s.name.startswith("SHFL"):
            c["shuffle"] += 1
        elif s.name.startswith("BAR"):
            c["barrier"] += 1
        elif re.match(r"(LDSM|STSM)\b", s.name):
            quantity = re.search(r"\.([124])\b(?!.*\.[124]\b)", s.name)
            c["shared bytes"] += 32 * 4 * (int(quantity.group(1)) if quantity else 1)
        elif re.match(r"(LDS|STS|LDSTM)\b", s.name):
            c["shared bytes"] += 32 * s.bytes_per_lane()
    return c


def resident_blocks(registers: int, shared: int, warps: int, m: Machine) -> int:
    """Thread blocks that fit: registers go out in 256s, shared memory in 128s and 1 KiB more."""
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // (per_warp * (-(-warps // 4) * 4)) if registers else m.blocks
    by_shared = m.shared * 1024 // (-(-(shared + 1024) // 128) * 128)
    return max(0, min(by_registers, by_shared, m.warps // warps, m.blocks))


def model(c: Counter, warps: int, m: Machine, useful: float, blocks: int, tma_bytes: float) -> Loop:
    """The bounds of a loop of which one warp does `c`; useful: FLOP of the result per iteration."""
    flop = c["flop"] * warps
    clocks = {
        "mma": flop / (m.mma * (2 if c["eight bit"] else 1)),
        "mufu": warps * 32 * c["mufu"] / 16,
        "fp32": warps * 32 * c["fp32"] / m.fp32,
        "alu": warps * 32 * c["alu"] / 64,
        "lsu": warps * (c["shuffle"] + c["shared bytes"] / 128),
        "issue": warps * c["all"] / 4,
        "smem": warps * (c["operand bytes"] + c["shared bytes"]) / 128,
        "l2": (warps * c["global bytes"] + c["tma"] * tma_bytes) / (5120 / m.count),
    }
    others = warps * (c["all"] - c["mma"]) / 4
    soft = max(clocks["mufu"], clocks["fp32"], clocks["alu"], clocks["lsu"], others)
    both = max(clocks["mma"], soft, clocks["issue"], clocks["smem"], clocks["l2"])
    after = clocks["mma"] + soft
    streams = max(1, blocks) * (1 if c["barrier"] else max(1, warps // 4))
    scale = (useful or flop) * m.count * m.ghz / 1e3
    return Loop(
        instructions=c["all"],
        counts=c,
        clocks=clocks | {"soft": soft},
        overlapped=scale / both,
        resident=scale / max(both, after / streams),
        serial=scale / max(after, clocks["smem"], clocks["l2"]),
        spills=c["spill"],
    )


# ------------------------------------------------------------- a compiled kernel


def _tool(name: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(path) if path.exists() else name


def _tma_bytes(ttgir: str) -> float:
    """Mean bytes of the descriptor loads in the loops of a kernel's GPU IR."""
    sizes, depth = [], []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.for" in line or "scf.while" in line:
            depth.append(indent)
        while depth and line.strip().startswith("}") and indent <= depth[-1]:
            depth.pop()
        found = re.search(r"async_tma_copy_global_to_local.*memdesc<((?:\d+x)+)[a-z]+(\d+)", line)
        if found and depth:
            size = int(found.group(2)) // 8
            for n in found.group(1).split("x")[:-1]:
                size *= int(n)
            sizes.append(size)
    return sum(sizes) / len(sizes) if sizes else 0.0


def analyse(
    cubin: bytes, warps: int, arch: int, shared: int, useful: float = 0.0, ttgir: str = ""
) -> Report:
    """The report of a compiled kernel for an NVIDIA GPU (the first function of the cubin)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        disassembled = subprocess.run(
            [_tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    parts = re.split(r"^\.section\s+\.text\.|^//-+ \.text\.", disassembled, flags=re.M)
    code, labels = parse(max(parts[1:] or [disassembled], key=len))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = map(int, found.groups()) if found else (0, 0)
    machine = MACHINES[arch]
    blocks = resident_blocks(registers, shared, warps, machine)
    report = Report(registers, stack, shared, blocks, count(code)["spill"])
    with_products = [
        b for b in natural_loops(code, labels) if any(_MMA.match(code[i].name) for i in b)
    ]
    for body in with_products:
        inner = any(other is not body and set(other) < set(body) for other in with_products)
        if not inner:
            c = count([code[i] for i in body])
            report.loops.append(model(c, warps, machine, useful, blocks, _tma_bytes(ttgir)))
    report.loops.sort(key=lambda loop: (-loop.resident, -loop.serial))
    return report
