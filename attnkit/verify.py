"""Every kernel of this machine beside float64, in half a minute: what `attnkit verify` runs.

A `Target` is a backend, and for the CPU kernels one of the instruction sets that this processor
has.  Each is checked in a process of its own, some at a time: an instruction set is chosen when the
kernels first run, and a kernel that crashes is then a line of the report, not its end.  What is
checked: out, lse and every gradient of `CASES`; a decoding step on caches of each kind; new tokens
on their way into a cache; and the bits that `attnkit.determinism.PROMISES` promises.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Timer
from typing import Any, NamedTuple, TextIO

import torch

from attnkit import determinism, dispatch, testing
from attnkit._slots import quantise
from attnkit.backends import cpu, triton
from attnkit.determinism import Runner, Step, decode_step, in_order, moved
from attnkit.testing import Case, Expected, Inputs, Results

SECONDS = 30.0  # in which all of it has to be done
AT_LEAST = 4  # checks of each target that are done however late it is
AT_ONCE = max(2, min(6, os.cpu_count() or 2))  # processes
PATIENCE = 120.0  # seconds without a word after which a process is taken to hang
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
FOR_TESTS = ("wide", "wide_tiles")  # instruction sets that no processor has: plain code
_LIKE: dict[str, Any] = {"dim": 64, "heads": 4, "kv_heads": 2}
CASES = (
    Case("full", 1, queries=70, keys=130, **_LIKE),
    Case("causal", 2, queries=130, keys=130, right=0, **_LIKE),
    # more than two groups of keys of any kernel: what was summed is rescaled
    Case("long, bottom right", 1, queries=70, keys=1100, right=0, bottom_right=True, **_LIKE),
    Case("lengths and sinks", 3, queries=65, keys=130, hide="lengths", sinks=True, **_LIKE),
    Case("window and softcap", 1, 2, 1, 70, 200, 32, left=40, right=3, softcap=3.0),
    Case("left padding and ALiBi", 2, 2, 1, 65, 65, 16, right=0, hide="left", alibi="head"),
    Case("documents", 2, 2, 1, 70, 130, 32, hide="segments"),
    Case("blocks", 1, 2, 1, 130, 200, 32, hide="blocks"),
    Case("bias", 2, 4, 2, 37, 70, 32, bias="float:11qk"),
    Case("dense mask", 2, 4, 2, 37, 70, 32, bias="bool:bhqk"),
    Case("dropout", 1, 4, 2, 130, 200, 32, dropout_p=0.3),
    Case("odd sizes", 2, 2, 1, 17, 63, 17, 33, right=0),
    Case("head dim 256", 1, 2, 1, 17, 65, 256, right=0),
    Case("packed", dim=32, packed=((17, 17), (1, 65), (70, 40)), right=0, bottom_right=True),
)


class Target(NamedTuple):
    """What is checked in one process."""

    backend: str
    isa: str = ""  # of the CPU kernels
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    bits: tuple[str, ...] = ("fp32",)  # dtypes in which promises of the same bits are tried

    def __str__(self) -> str:
        return f"{self.backend} ({self.isa})" if self.isa else self.backend


@dataclass
class Cell:
    """What was found for one row of the table in one dtype."""

    share: float | None = None  # the largest error, as a share of what is allowed
    wrong: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What was found for one target: cells by (row, dtype)."""

    target: str
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    steps: int = 0
    done: int = 0
    fault: str = ""  # what became of the process

    @property
    def wrong(self) -> list[str]:
        """Every complaint, a line each."""
        found = [
            f"{self.target} {dtype} {row}: {sentence}"
            for (row, dtype), cell in self.cells.items()
            for sentence in cell.wrong
        ]
        return found + ([f"{self.target}: {self.fault}"] if self.fault else [])

    def note(self, row: str, dtype: str, share: float | None, wrong: list[str]) -> None:
        """Add what a step found."""
        cell = self.cells.setdefault((row, dtype), Cell())
        if share is not None:
            cell.share = share if cell.share is None else _worse(cell.share, share)
        cell.wrong += wrong


def _worse(a: float, b: float) -> float:
    return a if a != a or a > b else b  # NaN is the worst


def targets() -> list[Target]:
    """What there is to check on this machine, in the order of `dispatch.BACKENDS`."""
    found = []
    for name in dispatch.available_backends():
        if name == "cpu":
            forced = os.environ.get("ATTNKIT_CPU_ISA")
            sets = [forced] if forced else [s for s in cpu.available_isas() if s not in FOR_TESTS]
            # the kernels of float64 are one and the same for all sets
            found.append(Target(name, sets[0], tuple(DTYPES), tuple(DTYPES)))
            found += [Target(name, isa) for isa in sets[1:]]
        elif name == "reference":
            found.append(Target(name, dtypes=tuple(DTYPES)))
        else:
            found.append(Target(name, bits=("fp32", "bf16", "fp16")))
    return found


# ---------------------------------------------------------------- the checks of one target

Found = Iterator[tuple[str, "float | None", list[str]]]  # row, share, complaints


def steps(target: Target) -> list[tuple[str, Callable[[], Found]]]:
    """The (dtype, check) pairs of a target, the most telling first."""
    module = dispatch.BACKENDS[target.backend]
    device = "cpu" if target.backend in ("cpu", "reference") or triton.INTERPRETED else "cuda"
    run = Runner(module, device)
    found: list[tuple[str, Callable[[], Found]]] = []
    appends = module.supports_append(*(torch.empty(1, 1, 1, 64, device=device),) * 4) is None
    for name in target.dtypes:
        dtype = DTYPES[name]
        found += [(name, partial(_numbers, run, target.backend, case, dtype)) for case in CASES]
        found.append((name, partial(_decoding, run, dtype)))
        if appends:
            found.append((name, partial(_appending, run, dtype)))
    for name in target.bits:
        for operation in determinism.OPERATIONS:
            for kind in determinism.PROMISES.get((operation, target.backend), ()):
                found.append((name, partial(_bits, run, operation, kind, DTYPES[name])))
    return found


def _numbers(run: Runner, backend: str, case: Case, dtype: torch.dtype) -> Found:
    x, want = testing.expected(case, dtype)
    here = moved(x, run.device)
    if run.module.supports(*here[:5]) is None:
        gradients = ("backward", backend) in determinism.PROMISES
        got = testing.run(backend, here, gradients)
        back: list[Any] = [t if t is None else t.cpu() for t in got]
        for name in want.allowed:
            if gradients and getattr(got, name) is None:
                yield name, None, [f"{case.name}: there is none"]
        yield from _compared(Results(*back), want, case.name)


def _compared(got: Results, want: Expected, what: str, row: str = "") -> Found:
    """One finding per result, or all of them under one row."""
    wrong = testing.complaints(got, want)
    for name, (allowed, _) in want.allowed.items():
        have, right = getattr(got, name), getattr(want.truth, name)
        if have is None:
            continue
        share = None
        if have.shape == right.shape and right.numel():
            finite = right.isfinite()
            error = (have.double() - right)[finite].abs()
            worst = float(error.max()) if error.numel() else 0.0
            share = 0.0 if worst == 0 else worst / allowed if allowed else float("inf")
        said = [f"{what}: {w}" for w in wrong if w.split()[0].rstrip(":") == name]
        yield row or name, share, said


def _decoding(run: Runner, dtype: torch.dtype) -> Found:
    """Caches side by side and in pages, in the model's dtype, int8 and fp8; one query and more."""
    kinds: list[tuple[str, dict[str, Any]]] = [("decode", {}), ("decode, pages", {"page": 16})]
    if dtype != torch.float64:
        kinds += [
            ("decode, int8", {"stored": torch.int8, "page": 16}),
            ("decode, fp8", {"stored": torch.float8_e4m3fn}),
        ]
    for row, options in kinds:
        for queries in (1, 3, 40):
            step = decode_step(dtype, queries, lengths=(300, 5, 70), **options)
            if run.module.supports_decode(*moved(step, run.device)) is not None:
                continue
            with testing.poisoned_memory():
                out, lse = run.decode(step)
            assert out is not None
            assert lse is not None
            for b, x in enumerate(_sequences(step)):
                one = slice(b, b + 1)
                yield from _compared(
                    Results(out[one], lse[one]),
                    testing.expect(x, gradients=False),
                    f"{queries} queries over {x.k.shape[2]} keys",
                    row,
                )


def _sequences(step: Step) -> Iterator[Inputs]:
    """Each sequence of a decoding step as a call of its own on what its cache holds, in float64."""
    table = step.cache.block_table
    k, v = (
        in_order(t, table).double() * (1.0 if s is None else in_order(s, table).double()[..., None])
        for t, s in ((step.k, step.cache.k_scale), (step.v, step.cache.v_scale))
    )
    assert step.args.lengths is not None
    for b, length in enumerate(step.args.lengths.tolist()):
        q = step.q[b : b + 1]
        keys, values = (t[b : b + 1, :, :length] for t in (k, v))
        args, zero = step.args._replace(lengths=None), torch.zeros_like(q)
        yield Inputs(q, keys, values, args, step.spec, zero, zero[..., 0].float())


def _appending(run: Runner, dtype: torch.dtype) -> Found:
    """New tokens stand where they belong, to the bit; int8 is what the definition quantises to."""
    for row, stored, page in (
        ("append", None, None),
        ("append, pages", None, 16),
        ("append, int8", torch.int8, 16),
    ):
        if stored is not None and dtype == torch.float64:
            continue
        step = decode_step(dtype, 3, stored=stored, page=page)
        before = [t if t is None else in_order(t, step.cache.block_table)
                  for t in (step.k, step.v, *step.cache[3:])]  # fmt: skip
        after = run.append(step)
        new = [step.q[:, ::2], step.q.flip(2)[:, ::2]]
        wrong = []
        for n, name in enumerate(("key", "value")):
            want, scale = before[n], before[n + 2]
            fresh, fresh_scale = (new[n], None) if stored is None else quantise(new[n], stored)
            assert want is not None
            assert step.args.lengths is not None
            for b, length in enumerate(step.args.lengths.tolist()):
                want[b, :, length : length + 3] = fresh[b]
                if scale is not None and fresh_scale is not None:
                    scale[b, :, length : length + 3] = fresh_scale[b]
            for what, a, w in (
                (name, after[n], want),
                (f"scale of the {name}", after[n + 2], scale),
            ):
                if w is not None and (a is None or not determinism.same_bits(a, w)):
                    wrong.append(f"the {what} is not what was given, or stands elsewhere")
        yield row, None, wrong


def _bits(run: Runner, operation: str, kind: str, dtype: torch.dtype) -> Found:
    wrong = determinism.broken(operation, kind, run.module, dtype, run.device)
    yield f"same bits: {kind}", None, [f"{operation}: {sentence}" for sentence in wrong]


# ---------------------------------------------------------------- processes


def examine(target: Target, end: float, progress: Callable[[int, int], None]) -> Report:
    """All checks of a target in this process until `end` (as of time.time).

    An exception is a finding.  The instruction set has to be that of the process.
    """
    report = Report(str(target))
    torch.set_num_threads(1)
    todo = steps(target)
    report.steps = len(todo)
    if target.isa and cpu.instruction_set() != target.isa:
        report.fault = f"the kernels in use are those of {cpu.instruction_set()}"
        return report
    for n, (dtype, check) in enumerate(todo):
        if n >= AT_LEAST and time.time() > end:
            break
        try:
            for row, share, wrong in check():
                report.note(row, dtype, share, wrong)
        except Exception as error:
            report.note("raised", dtype, None, [f"{type(error).__name__}: {error}"[:500]])
        report.done += 1
        progress(report.done, report.steps)
    if not any(row == "out" for row, _ in report.cells) and not report.wrong:
        report.fault = "it declined every call"
    return report


def _child(target: Target, end: float) -> None:
    """Print how far it is and, at the end, the report, a line of JSON each."""
    report = examine(target, end, lambda done, of: print(json.dumps([done, of]), flush=True))
    cells = [(*key, cell.share, cell.wrong) for key, cell in report.cells.items()]
    print(json.dumps([report.done, report.steps, report.fault, cells]), flush=True)


def _in_a_process(target: Target, end: float, progress: Callable[[int, int], None]) -> Report:
    report = Report(str(target))
    command = [sys.executable, "-m", "attnkit.verify", json.dumps(target), str(end)]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    if target.isa:
        environment["ATTNKIT_CPU_ISA"] = target.isa
    with (
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
        ThreadPoolExecutor(1) as reader,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        said = reader.submit(process.stderr.read)
        alarm = _Alarm(process)
        whole = False
        for line in process.stdout:
            alarm.reset()
            try:
                news = json.loads(line)
            except json.JSONDecodeError:  # something that a library printed
                continue
            report.done, report.steps = news[:2]
            if len(news) == 2:
                progress(*news)
            else:
                whole, report.fault = True, news[2]
                for row, dtype, share, wrong in news[3]:
                    report.note(row, dtype, share, wrong)
        code = process.wait()
        alarm.off()
        lines = said.result().strip().splitlines() or ["it said nothing"]
        last = next((line for line in lines if line.startswith("Fatal")), lines[-1])
    if not whole or code:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        how = "hung and was stopped" if alarm.rang else how
        report.fault = f"the process {how} after {report.done} checks: {last[:300]}"
    return report


class _Alarm:
    """Kills a process that has said nothing for PATIENCE seconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.rang = process, False
        self.reset()

    def reset(self) -> None:
        """It was heard of."""
        self.off()
        self.timer = Timer(PATIENCE, self._ring)
        self.timer.daemon = True
        self.timer.start()

    def off(self) -> None:
        """It has ended."""
        if hasattr(self, "timer"):
            self.timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        self.process.kill()


class _Progress:
    """One line that says how far each target is, where there is a terminal to move on."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.lock = stream, Lock()
        self.at: dict[str, str] = {}
        self.live = stream.isatty()

    def __call__(self, target: Target, text: str, over: bool = False) -> None:
        with self.lock:
            self.at[str(target)] = text
            if over:
                del self.at[str(target)]
                line = f"{target}: {text}\n"
                self.stream.write(("\r\033[K" if self.live else "") + line)
            if self.live:
                now = "   ".join(f"{name} {text}" for name, text in self.at.items())
                self.stream.write(f"\r\033[K{now[:100]}")
            self.stream.flush()


def verify(seconds: float = SECONDS, progress: TextIO | None = None) -> list[Report]:
    """Check all targets of this machine, and say on ``progress`` how far that is.

    Whatever does not fit into ``seconds`` is left out, and counted in the reports.
    """
    show = _Progress(progress) if progress is not None else None
    found = targets()
    end, waiting, lock = time.time() + seconds, len(found), Lock()

    def one(target: Target) -> Report:
        nonlocal waiting
        with lock:  # an equal share, for those that still wait, of the time that is left
            rounds = -(-waiting // AT_ONCE)
            waiting -= 1
        mine = time.time() + (end - time.time()) / rounds

        def step(done: int, of: int) -> None:
            if show is not None:
                show(target, f"{done}/{of}")

        report = _in_a_process(target, mine, step)
        if show is not None:
            state = f"{len(report.wrong)} WRONG" if report.wrong else "right"
            show(target, f"{report.done} of {report.steps} checks, {state}", over=True)
        return report

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, found))


# ---------------------------------------------------------------- the table

ROWS = (
    *("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"),
    *("decode", "decode, pages", "decode, int8", "decode, fp8"),
    *("append", "append, pages", "append, int8"),
    *(f"same bits: {kind}" for kind in determinism.KINDS),
    "raised",
)


def table(report: Report) -> str:
    """What was found for one target, a row for each result and a column for each dtype."""
    dtypes = [d for d in DTYPES if any(key[1] == d for key in report.cells)]
    lines = [f"{report.target:24}" + "".join(f"{d:>8}" for d in dtypes)]
    for row in ROWS:
        cells = [report.cells.get((row, d)) for d in dtypes]
        if any(cell is not None for cell in cells):
            lines.append(f"  {row:22}" + "".join(f"{_text(cell):>8}" for cell in cells))
    return "\n".join(lines)


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell.wrong:
        return "WRONG"
    return "yes" if cell.share is None else f"{cell.share:.2f}"


def main(seconds: float = SECONDS) -> int:
    """``attnkit verify``: run, print the tables, and return 1 if anything is wrong."""
    start = time.monotonic()
    reports = verify(seconds, sys.stderr)
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    print(
        "\nEvery result beside float64. A number is the largest error, as a share of what is\n"
        "allowed (twice the error of the naive formula in that dtype, plus rounding): below 1 is\n"
        "right.\n"
    )
    print("\n\n".join(table(report) for report in reports))
    for name, reason in dispatch.status().items():
        if reason is not None:
            print(f"\n{name}: not here, since {reason}", end="")
    wrong = [sentence for report in reports for sentence in report.wrong]
    done, of = sum(r.done for r in reports), sum(r.steps for r in reports)
    print(f"\n\n{done} of {of} checks in {time.monotonic() - start:.0f} s: ", end="")
    if not wrong:
        if done == of:
            print("everything is right")
        else:
            print(
                "what was checked is right. There was no time for the rest:\n"
                f"attnkit verify --seconds {math.ceil(4 * seconds)} takes more"
            )
        return 0
    print(f"{len(wrong)} WRONG\n")
    print("\n".join(f"  {sentence}" for sentence in wrong[:40]))
    if len(wrong) > 40:
        print(f"  and {len(wrong) - 40} more")
    print("\nPlease report this with the whole output of `attnkit info` and `attnkit verify`.")
    return 1


if __name__ == "__main__":  # a child
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=json.loads)
    parser.add_argument("end", type=float)
    options = parser.parse_args()
    _child(Target(*options.target), options.end)
