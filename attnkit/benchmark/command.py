"""The command ``attnkit bench``: presets, one's own shapes, and two result files compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from attnkit.benchmark import regressions
from attnkit.benchmark.cases import DTYPES, FEATURES, OPERATIONS, Case
from attnkit.benchmark.measuring import OPTIONAL, USUAL, Preset, Settings, check_name, run
from attnkit.benchmark.presets import PRESETS
from attnkit.benchmark.results import Results, cells, headline
from attnkit.benchmark.suites import SUITES
from attnkit.benchmark.tasks import Task
from attnkit.benchmark.timing import CLOCKS

COLUMNS = (
    *("case", "operation", "implementation", "median ms", "best ms", "GF/s"),
    *("of peak", "x baseline", "extra MiB", "row error"),
)


def sizes(text: str) -> tuple[int, ...]:
    """``B,H,L,D`` as four numbers."""
    numbers = tuple(int(part) for part in text.split(","))
    if len(numbers) != 4 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected four sizes B,H,L,D of at least 1")
    return numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``attnkit bench`` takes."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="what to measure (default: quick)")
    add("--suites", nargs="+", choices=SUITES, metavar="SUITE", help=f"of {', '.join(SUITES)}")
    own = parser.add_argument_group("your own shape, in place of a preset")
    add = own.add_argument
    add("--shape", type=sizes, nargs="+", metavar="B,H,L,D", help="batch, heads, length, head dim")
    add("--dtype", nargs="+", choices=DTYPES, default=["fp32"], help="(default: fp32)")
    add("--kv-heads", type=int, default=0, metavar="N", help="heads of key and value (default: H)")
    add("--keys", type=int, default=0, metavar="N", help="number of keys (default: L)")
    add("--value-dim", type=int, default=0, metavar="N", help="head dim of value (default: D)")
    add("--causal", action="store_true", help="query i sees keys j <= i")
    add("--window", type=int, metavar="N", help="keys nearer than N are seen")
    add("--padding", action="store_true", help="lengths from 25%% to 100%% over the batch")
    add("--features", nargs="+", choices=FEATURES, default=[], metavar="NAME",
        help=f"of {', '.join(FEATURES)}")  # fmt: skip
    add("--operations", nargs="+", choices=[*OPERATIONS, "decode"], metavar="NAME",
        default=["forward", "backward"], help="forward, backward, step, decode")  # fmt: skip
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    how = parser.add_argument_group("how to measure")
    add = how.add_argument
    add("--implementations", nargs="+", metavar="NAME",
        help="attnkit, torch, naive, attnkit:reference, ...; all: everyone who can; usual (default)"
        f": without {', '.join(OPTIONAL)} and torch's forced backends")  # fmt: skip
    add("--rounds", type=int, metavar="N", help="how often each is timed (default: the preset's)")
    add("--threads", type=int, metavar="N", help="of PyTorch (default: all cores)")
    add("--clock", choices=CLOCKS, help="cpu: for one thread, on a machine that is busy")
    add("--no-memory", action="store_true", help="leave out the peak memory")
    add("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"),
                        help="measure nothing; compare two result files, exit status 1 if attnkit "
                        "became slower")  # fmt: skip


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        if options.compare:
            old, new = (_load(path) for path in options.compare)
            text, status = regressions.report(old, new)
            print(text)
            return status
        preset = chosen_preset(options)
    except ValueError as error:
        parser.error(str(error))
    with _progress(len(preset.tasks)) as step:
        results = run(preset, memory=not options.no_memory, threads=options.threads, progress=step)
    show(results)
    if options.json:
        results.save(options.json)
        print(f"written to {options.json}; attnkit report {options.json} makes a page of it")
    return 0


def chosen_preset(options: argparse.Namespace) -> Preset:
    """What the options ask for; raises ValueError where they do not fit together."""
    if options.shape and (options.preset or options.suites):
        raise ValueError("argument --shape: not allowed with --preset or --suites")
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"argument --rounds: {options.rounds}, expected at least 1")
    preset = own_shapes(options) if options.shape else PRESETS[options.preset or "quick"]
    settings = preset.settings
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
    if options.clock:
        settings = replace(settings, clock=options.clock)
    if options.implementations:
        named = tuple(options.implementations)
        for name in named:
            if name not in ("all", "usual"):
                check_name(name)
        wanted = {("all",): (), ("usual",): USUAL}.get(named, named)
        settings = replace(settings, implementations=wanted)
    tasks = [t for t in preset.tasks if not options.suites or t.suite in options.suites]
    if not tasks:
        raise ValueError(f"argument --suites: the preset has none of {', '.join(options.suites)}")
    return Preset(tuple(tasks), settings)


def own_shapes(options: argparse.Namespace) -> Preset:
    """The preset of ``--shape`` and what goes with it."""
    terms = [name for name in ("causal",) if options.causal]
    terms += [f"window:{options.window}"] if options.window is not None else []
    terms += ["padded"] if options.padding else []
    mask = "+".join([*terms, *options.features]) or "full"
    tasks = []
    for batch, heads, length, dim in options.shape:
        for dtype in options.dtype:
            case = Case(
                batch, heads, length, dim, dtype, mask, options.keys, options.kv_heads,
                options.value_dim, options.device,
            )  # fmt: skip
            tasks += [Task(name, name, case) for name in options.operations]
    return Preset(tuple(tasks), Settings())


def show(results: Results) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe: nothing is cut
        console = Console(highlight=False, width=200)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if index < 3 else "right")
    group = None
    for row in results.rows:
        texts = cells(results, row)
        if row.group == group:
            texts[:2] = "", ""
        group = row.group
        style = "bold" if row.implementation == "attnkit" else None
        table.add_row(*texts, style=style)
    console.print(headline(results.machine, results.versions), style="dim")
    console.print(table)
    for text in skipped(results):
        console.print(text, style="dim")


def skipped(results: Results) -> list[str]:
    """Who was left out and why, each reason once."""
    reasons: dict[str, list[str]] = {}
    for entry in results.skipped:
        names = reasons.setdefault(entry["reason"], [])
        if entry["implementation"] not in names:
            names.append(entry["implementation"])
    return [f"left out: {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _load(path: Path) -> Results:
    try:
        return Results.load(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], object]]:
    """A bar on a terminal's standard error; elsewhere a line for each task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns: Sequence[TextColumn | BarColumn | MofNCompleteColumn | TimeElapsedColumn] = (
        BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        done = 0

        def step(text: str) -> None:
            nonlocal done
            bar.update(task, completed=done, description=text)
            done += 1

        yield step
