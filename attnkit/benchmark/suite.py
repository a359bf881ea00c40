"""Measure cases: check the numbers, time implementations against each other, weigh the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from attnkit.benchmark.cases import DTYPES, Case, Inputs, make_inputs, prepare, ran
from attnkit.benchmark.machine import describe_machine
from attnkit.benchmark.memory import MemoryMeter
from attnkit.benchmark.numeric import TOLERANCE, Truth, check, truth
from attnkit.benchmark.probes import PROBE, Peak, Probe, flops_probe
from attnkit.benchmark.results import Results, Row
from attnkit.benchmark.timing import CLOCKS, Candidate, compare

NAIVE_COPIES = 6  # score matrices that the naive forward and backward hold at once
NAIVE_SHARE = 0.5  # of the machine's memory that they may take


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    rounds: int = 7
    min_time: float = 0.05  # seconds of each candidate in each round
    seed: int = 0  # of the inputs and of the order
    implementations: tuple[str, ...] = ("attnkit", "torch", "naive")
    clock: str = "wall"  # or "cpu", for one thread on a machine that is busy with other work


@dataclass(frozen=True)
class Preset:
    """A named choice of cases, with the settings that fit its time."""

    cases: tuple[Case, ...]
    operations: tuple[str, ...] = ("forward", "backward")
    settings: Settings = field(default_factory=Settings)


@dataclass
class Subject:
    """A case with its inputs and its truth, made once for all operations on it."""

    case: Case
    inputs: Inputs
    true: Truth

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Subject:
        """Draw the inputs and compute the float64 results."""
        inputs = make_inputs(case, seed)
        return cls(case, inputs, truth(case, inputs))


def check_all(
    subject: Subject, operation: str, implementations: Iterable[str]
) -> dict[str, dict[str, float]]:
    """The errors of every implementation; raises WrongResult at the first that is wrong."""
    case = subject.case
    return {
        name: check(
            f"{name} {operation} on {case.label}",
            prepare(name, operation, case, subject.inputs).results(),
            subject.true,
            TOLERANCE[case.dtype],
        )
        for name in implementations
    }


def measure(
    subject: Subject,
    operation: str,
    settings: Settings,
    *,
    probe: Probe | None = None,
    meter: MemoryMeter | None = None,
) -> list[Row]:
    """Rows of all implementations on one case, timed against each other after they were checked.

    Args:
        subject: the case.
        operation: ``forward``, ``backward`` or ``step``.
        settings: how to measure, and the implementations.
        probe: runs as one more candidate, so that the rows know their share of the peak.
        meter: measures the peak memory of each implementation, if given.

    Raises:
        WrongResult: an implementation's numbers are wrong; nothing is timed then.
    """
    case, inputs = subject.case, subject.inputs
    names = settings.implementations
    errors = check_all(subject, operation, names)
    finish = torch.cuda.synchronize if case.device.startswith("cuda") else None
    candidates = [
        Candidate(name, prepare(name, operation, case, inputs).call, finish) for name in names
    ]
    if probe is not None:
        candidates.append(probe.candidate())
    timed = compare(
        candidates,
        rounds=settings.rounds,
        min_time=settings.min_time,
        seed=settings.seed,
        clock=CLOCKS[settings.clock],
    )
    peak = None if probe is None else Peak.of(probe, timed.samples[PROBE])
    rows = []
    for name in names:
        use = None if meter is None else meter.measure(name, operation, case)
        rows.append(
            Row(
                group=f"{case.label} {operation}",
                operation=operation,
                implementation=name,
                backend=ran(name, case, inputs),
                shape=case.shape,
                dtype=case.dtype,
                mask=case.mask,
                device=case.device,
                **asdict(timed.samples[name]),
                flops=case.flops(operation),
                peak=peak,
                errors=errors[name],
                extra_bytes=None if use is None else use.extra,
                memory_method=None if use is None else use.method,
            )
        )
    return rows


def run(
    preset: Preset,
    *,
    memory: bool = True,
    threads: int | None = None,
    progress: Callable[[str], object] | None = None,
) -> Results:
    """Measure all cases and operations of a preset.

    Args:
        preset: what to measure, e.g. ``PRESETS["quick"]``.
        memory: also measure peak memory, each in a child process.
        threads: of PyTorch, while measuring; as it is when None.
        progress: called with a line of text before each comparison.
    """
    settings, before = preset.settings, torch.get_num_threads()
    rows: list[Row] = []
    skipped: list[dict[str, str]] = []
    try:
        torch.set_num_threads(threads or before)
        probe = flops_probe()
        with MemoryMeter() as meter:
            for case in preset.cases:
                names, reasons = feasible(case, settings.implementations)
                some = replace(settings, implementations=names)
                subject = Subject.of(case, settings.seed)
                for operation in preset.operations:
                    if progress is not None:
                        progress(f"{case.label} {operation}")
                    for name, reason in reasons.items():
                        where = {"case": case.label, "operation": operation}
                        skipped.append({**where, "implementation": name, "reason": reason})
                    on_cpu = case.device == "cpu"
                    rows += measure(
                        subject,
                        operation,
                        some,
                        probe=probe if on_cpu else None,
                        meter=meter if memory and on_cpu else None,
                    )
        how = asdict(settings) | {
            "implementations": list(settings.implementations),
            "operations": list(preset.operations),
        }
        return Results.here(rows, how, skipped)
    finally:
        torch.set_num_threads(before)


def feasible(case: Case, implementations: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The implementations that fit the memory, and the reason for each that does not."""
    scores = case.batch * case.heads * case.queries * case.keys * DTYPES[case.dtype].itemsize
    need, most = NAIVE_COPIES * scores, NAIVE_SHARE * describe_machine().memory_bytes
    if "naive" not in implementations or need <= most:
        return tuple(implementations), {}
    reason = f"its score matrices need {need / 2**30:.1f} GiB, over half of the machine's memory"
    return tuple(n for n in implementations if n != "naive"), {"naive": reason}


def _everywhere(*cases: Case, dtypes: str = "fp32 bf16", which: str = "full causal") -> list[Case]:
    """Each case with each dtype and mask."""
    return [
        replace(case, dtype=dtype, mask=mask)
        for dtype in dtypes.split()
        for case in cases
        for mask in which.split()
    ]


PRESETS = {
    # seconds: to see that everything runs
    "smoke": Preset(
        cases=(Case(1, 2, 65, 16), Case(2, 2, 65, 16, dtype="bf16", mask="padded")),
        settings=Settings(rounds=2, min_time=0.001),
    ),
    # two minutes on two cores
    "quick": Preset(
        cases=(
            *_everywhere(Case(1, 8, 1024, 64), dtypes="fp32"),
            Case(1, 8, 1024, 64, dtype="bf16", mask="causal"),
            Case(8, 12, 128, 64),
            Case(4, 8, 512, 64, mask="padded"),
        ),
        settings=Settings(rounds=5),
    ),
    # the shapes by which CPU kernels are judged: long, short, padded, half precision
    "cpu": Preset(
        cases=(
            *_everywhere(Case(1, 8, 1024, 64), Case(1, 8, 4096, 64), Case(1, 32, 1024, 128)),
            Case(1, 8, 4096, 128),
            Case(1, 1, 4096, 64),
            *_everywhere(
                Case(8, 12, 197, 64),
                Case(8, 12, 577, 64),
                Case(8, 12, 128, 64),
                Case(32, 12, 32, 64),
                which="full",
            ),
            *_everywhere(Case(8, 8, 1024, 64), which="padded"),
            Case(1, 8, 1024, 64, dtype="fp16"),
        ),
        operations=("forward", "backward", "step"),
    ),
}
