"""The goals of the CPU kernels, row by row: required, aimed at, reached.

    python bench/cpu_goals.py [--rounds N] [--threads N] [--only WORD ...] [--no-memory]
    python bench/cpu_goals.py --threads 1 --clock cpu       # on a machine that is busy
    python bench/cpu_goals.py --without flex                # peers that are not wanted
    python bench/cpu_goals.py --keep --only bf16            # these anew, the rest as in the file

Every implementation of a row is timed in the same interleaved rounds, with a probe of the machine's
peak.  The goals are multiples of torch's speed, measured where the processor has AVX-512 with bf16
instructions; elsewhere the share of the peak is what counts.  Writes Markdown and JSON named after
date and machine into bench/results (or --output), anew after every row.  Exit status 1 when a
requirement is missed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from attnkit.backends import cpu
from attnkit.benchmark import (
    CLOCKS,
    Case,
    Results,
    Row,
    Settings,
    Task,
    Workshop,
    describe_machine,
    headline,
)
from attnkit.benchmark.presets import CPU_PEERS, decoding

RESULTS = Path(__file__).resolve().parent / "results"
REACHED = 0.92  # of the ratios that a prototype reached, which are the goals of plain rows
FULL_SPEED = {"avx512f", "avx512_bf16"}  # where ratios to torch are what counts
BF16_RATE = 2.0  # bf16 multiply-adds for one in fp32, where there are instructions for them
READ_ENOUGH = 0.90  # of the read rate: then a peer may be as fast
SHARES = {  # of the peak, at 1024 keys and more: (full, causal)
    "fp32": (0.93, 0.88),
    "bf16": (0.88, 0.83),
}
PEER_FACTORS = {  # beside the best of the peers, forward: (full, causal)
    "fp32": (1.1, 1.5),
    "bf16": (1.3, 2.2),
}


class Goal(NamedTuple):
    """A row: so many times torch's speed are required, so many aimed at."""

    task: Task
    required: float
    aim: float | None = None  # times torch
    share: float | None = None  # of the peak, aimed at
    folded: float | None = None  # times folded torch, required


def plain(operation: str, case: Case, ratio: float) -> Goal:
    """A row whose prototype reached ``ratio``."""
    long = case.keys >= 1024 and case.dtype in SHARES
    share = SHARES[case.dtype]["causal" in case.terms] if long else None
    return Goal(Task(operation, operation, case), REACHED * ratio, share=share)


def reading(case: Case, required: float, folded: float | None = None) -> Goal:
    """A row of decoding, which aims at the rate of reading."""
    return Goal(Task("decode", "decode", case), required, share=0.95, folded=folded)


def goals() -> list[Goal]:
    """The table, in its order."""
    square = Case(1, 8, 1024, 64)
    wide = Case(1, 32, 1024, 128)
    causal = replace(square, mask="causal")
    rows = [
        plain("forward", square, 2.5),
        plain("forward", Case(1, 8, 4096, 128), 2.5),
        plain("forward", Case(8, 12, 128, 64), 2.9),
        plain("forward", causal, 3.4),
        plain("forward", replace(wide, mask="causal"), 3.0),
        plain("forward", replace(square, dtype="bf16"), 4.9),
        plain("forward", replace(wide, dtype="bf16"), 5.1),
        plain("forward", replace(causal, dtype="bf16"), 6.7),
        plain("forward", Case(1, 8, 4096, 64, "bf16", "causal"), 5.9),
    ]
    for case, backward, step in (
        (square, 2.55, 2.6),
        (causal, 3.7, 3.6),
        (Case(1, 1, 4096, 64), 3.8, 3.6),
        (replace(square, dtype="bf16"), 3.6, 3.9),
        (replace(causal, dtype="bf16"), 4.1, 4.7),
    ):
        rows += [plain("backward", case, backward), plain("step", case, step)]
    for dtype, forward, step, aims in (("fp32", 5.0, 4.5, (6, 5.5)), ("bf16", 9.0, 6.5, (12, 8))):
        case = Case(8, 8, 1024, 64, dtype, "padded")
        rows.append(Goal(Task("forward", "forward", case), forward, aims[0]))
        rows.append(Goal(Task("step", "step", case), step, aims[1]))
    half = replace(square, dtype="fp16")
    rows.append(Goal(Task("forward", "forward", half), 3.0, 4.0))
    rows.append(Goal(Task("backward", "backward", half), 15.0, 26.0))
    rows += [
        reading(decoding(1, 8, 2048), 3.5),
        reading(decoding(1, 32, 2048), 2.0),
        reading(decoding(1, 8, 2048, "bf16"), 30.0, folded=4.0),
        reading(decoding(8, 8, 2048, "bf16"), 30.0, folded=4.0),
        reading(decoding(1, 32, 2048, "bf16"), 8.0),
        Goal(Task("decode", "decode", decoding(1, 8, 2048, "fp32", "int8")), 11.0, 22.0),
    ]
    short = (Case(8, 12, 197, 64), Case(8, 12, 577, 64), Case(8, 12, 128, 64), Case(32, 12, 32, 64))
    for dtype, ratios in (("fp32", (2.3, 2.5, 2.8, 1.7)), ("bf16", (4.4, 4.5, 5.0, 3.2))):
        for case, ratio in zip(short, ratios, strict=True):
            if (dtype, case.queries) != ("fp32", 128):  # is above
                task = Task("forward", "forward", replace(case, dtype=dtype))
                rows.append(Goal(task, ratio, 1.1 * ratio))
    for dtype, queries, ratio in (("fp32", 2, 3.5), ("fp32", 16, 1.8), ("bf16", 2, 7.0),
                                  ("bf16", 16, 3.8)):  # fmt: skip
        task = Task("decode", "decode", decoding(1, 8, 4096, dtype, queries=queries))
        rows.append(Goal(task, ratio, 1.15 * ratio))
    return rows


class Verdict(NamedTuple):
    """A line of the table, and whether what is required was reached (None: nothing is)."""

    cells: tuple[str, ...]
    met: bool | None


def judge(goal: Goal, results: Results, fast: bool) -> Verdict:
    """Beside torch where ``fast``, else by the share of the peak."""
    rows = {row.implementation: row for row in results.rows if row.group == goal.task.group}
    ours = rows["attnkit"]
    ratio, share = results.ratio(ours, "torch"), share_of_peak(ours, fast)
    if ratio is None or share is None:
        raise ValueError(f"{goal.task.group} has no torch row or no peak")
    peer, beside = best_peer(results, ours, rows)
    wanted = [f"{goal.required:.2f}x torch"]
    misses = [] if ratio.median >= goal.required else [f"under {goal.required:.2f}x torch"]
    folded = results.ratio(ours, "torch:folded") if goal.folded else None
    if goal.folded and folded is not None:
        wanted.append(f"{goal.folded:.1f}x folded")
        misses += [] if folded.median >= goal.folded else [f"{folded.median:.2f}x folded torch"]
    factor = peer_factor(goal.task, share)
    if beside is not None and factor is not None:
        wanted.append(f"{factor:.1f}x best peer")
        misses += [] if beside >= factor else [f"{beside:.2f}x {peer}"]
    aims = [f"{goal.aim:.2f}x torch"] if goal.aim else []
    aims += [f"{goal.share:.0%} of peak"] if goal.share else []
    if fast:
        met: bool | None = not misses
        verdict = "met" if met else f"MISSED: {', '.join(misses)}"
    else:  # required there: the share of the peak that is aimed at here
        met = None if goal.share is None else share >= goal.share
        verdict = {True: "met", None: "no goal for this machine"}.get(
            met, f"SHORT: {share:.0%} of {goal.share or 0:.0%}"
        )
    rate = ours.gflops if ours.gigabytes is None else ours.gigabytes
    cells = (
        goal.task.group,
        ", ".join(wanted),
        ", ".join(aims) or "the same",
        f"{rate:.3g} {'GF/s' if ours.gigabytes is None else 'GB/s'}",
        f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        f"{share:.0%}",
        "" if beside is None else f"{beside:.2f}x {peer}",
        "" if ours.extra_bytes is None else f"{ours.extra_bytes / 2**20:.1f}",
        verdict,
    )
    return Verdict(cells, met)


def share_of_peak(row: Row, fast: bool) -> float | None:
    """The share of the peak; that of bf16 is twice the probed one where there are instructions."""
    share = row.share_of_peak
    bounded = row.peak is not None and row.peak.unit == "FLOP/s" and row.dtype == "bf16" and fast
    return share if share is None or not bounded else share / BF16_RATE


def best_peer(results: Results, ours: Row, rows: dict[str, Row]) -> tuple[str, float | None]:
    """The fastest of the others in these rounds, and how many times faster ours is."""
    found = {
        name: ratio.median
        for name in rows
        if name != "attnkit" and (ratio := results.ratio(ours, name)) is not None
    }
    if not found:
        return "", None
    name = min(found, key=lambda name: found[name])
    return name, found[name]


def peer_factor(task: Task, share: float) -> float | None:
    """How many times faster than the best peer is required."""
    if task.suite == "decode":
        return None if share >= READ_ENOUGH else 1.1
    if task.operation != "forward" or task.case.dtype not in PEER_FACTORS:
        return None
    return PEER_FACTORS[task.case.dtype]["causal" in task.case.terms]


HEAD = (
    *("row", "required", "aim", "ours", "x torch (middle half)", "of peak", "beside the best peer"),
    *("extra MiB", ""),
)


def table(wanted: list[Goal], results: Results, fast: bool) -> tuple[str, int]:
    """The Markdown, and the number of missed requirements."""
    done = {row.group for row in results.rows}
    verdicts = [judge(goal, results, fast) for goal in wanted if goal.task.group in done]
    missed = sum(verdict.met is False for verdict in verdicts)
    peers = ", ".join(f"{name} {v}" for name, v in results.versions.peers.items())
    lines = [
        "# Goals of the CPU kernels: `make bench-cpu`",
        "",
        f"{headline(results.machine, results.versions)}; instruction set {cpu.instruction_set()};",
        f"{peers or 'no peers installed'}; {results.created}, commit {results.commit};",
        f"{results.settings['rounds']} rounds, {results.settings['clock']} clock.",
        "",
        "Ratios are medians over paired rounds. The peak is that of fp32 multiply-adds (twice that",
        "for bf16 where there are bf16 instructions), or the rate of reading for caches, probed in",
        "the same rounds; rate and share are those of the fastest call.",
        ""
        if fast
        else "\nThis processor is none of those that the multiples of torch's speed were "
        "set for (AVX-512 with bf16):\nonly the share of the peak counts.\n",
        f"| {' | '.join(HEAD)} |",
        "|---|---|---|--:|--:|--:|--:|--:|---|",
        *(f"| {' | '.join(verdict.cells)} |" for verdict in verdicts),
        "",
        f"{len(verdicts)} of {len(wanted)} rows measured, {missed} short of what is required.",
    ]
    return "\n".join(lines) + "\n", missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="threads of PyTorch (all cores)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--only", nargs="+", default=[], help="rows with one of these words")
    parser.add_argument("--without", nargs="+", default=[], help="implementations to leave out")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--keep", action="store_true", help="keep rows of today's file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder (bench/results)")
    options = parser.parse_args()
    if not cpu.BUILT:
        print("the C++ extension is not built: there is nothing to hold to these goals")
        return 2
    chosen = [
        goal
        for goal in goals()
        if not options.only or any(word in goal.task.group for word in options.only)
    ]
    if options.threads:
        torch.set_num_threads(options.threads)
    names = ("attnkit", "torch", "torch:folded", *CPU_PEERS)
    wanted = tuple(name for name in names if name not in options.without)
    settings = Settings(options.rounds, implementations=wanted, clock=options.clock)
    name = re.sub(r"[^a-z0-9]+", "-", describe_machine().cpu.lower()).strip("-")
    day = datetime.date.today().isoformat()
    path = options.output / f"{day}-cpu-goals-{name}-{cpu.instruction_set()}.json"
    groups = {goal.task.group for goal in chosen}
    kept = Results.load(path).rows if options.keep and path.exists() else ()
    rows = [row for row in kept if row.group not in groups]
    text, missed = "", 0
    with Workshop(settings, memory=not options.no_memory) as workshop:
        for goal in chosen:
            print(goal.task.group, file=sys.stderr, flush=True)
            rows += workshop.measure(goal.task)
            results = workshop.results(rows)
            fast = set(results.machine.flags) >= FULL_SPEED
            text, missed = table(goals(), results, fast)
            results.save(path)
            path.with_suffix(".md").write_text(text)
    print(text)
    print(f"written to {path} and {path.with_suffix('.md').name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
