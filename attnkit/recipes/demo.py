"""The main job in six steps: machine, exactness, speed, training, generation, pictures.

Each step prints what it found and returns it; at the end everything is written to one folder.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit import benchmark, dispatch, viz
from attnkit.benchmark import Case, Preset, Settings
from attnkit.benchmark.cases import DTYPES
from attnkit.recipes.date_translation import (
    GenerationCheck,
    History,
    Recipe,
    Score,
    Task,
    Translator,
    alignments,
    generation_speeds,
    train,
)
from attnkit.recipes.dates import LANGUAGES, every_language, make_example

if TYPE_CHECKING:
    from rich.console import Console

GOAL = 0.995
NUM_BEAMS = 4
SCHEMA, VERSION = "attnkit.demo", 1
FIGURE_LANGUAGES = ("hu", "ja", "tr", "de", "ru")  # the first four whose glyphs are installed


@dataclass(frozen=True)
class Options:
    """What a run of the demo is asked for.

    ``quick`` goes through every step with tiny sizes: it shows that the demo runs, trains next to
    nothing and holds the translations to no goal.
    """

    output: Path = Path("runs/demo")
    seed: int = 0
    device: str = "cpu"
    quick: bool = False

    @property
    def recipe(self) -> Recipe:
        """How to train."""
        recipe = Recipe(seed=self.seed)
        if not self.quick:
            return recipe
        return replace(
            recipe,
            d_model=32,
            d_ff=64,
            batch_size=32,
            warmup=10,
            max_steps=30,
            max_length=28,
            validate_every=30,
            validation_dates=2,
            glance=1,
            test_dates=2,
        )

    @property
    def speed(self) -> Preset:
        """What to time."""
        if self.quick:
            cases: tuple[Case, ...] = (Case(1, 2, 128, 32, mask="causal", device=self.device),)
            return Preset.of(cases, settings=Settings(rounds=1, min_time=0.001, seed=self.seed))
        cases = (
            Case(1, 8, 1024, 64, device=self.device),
            Case(1, 8, 1024, 64, mask="causal", device=self.device),
            Case(8, 8, 256, 64, mask="padded", device=self.device),
            Case(1, 4, 4096, 64, mask="causal", device=self.device),
        )
        return Preset.of(cases, settings=Settings(rounds=5, min_time=0.02, seed=self.seed))


@dataclass
class ErrorRow:
    """The largest row errors of one backend in one dtype against float64, or why there are none."""

    backend: str
    dtype: str
    tolerance: float
    errors: dict[str, float] = field(default_factory=dict)
    refusal: str = ""

    @property
    def right(self) -> bool:
        """Every error is within the tolerance (a NaN is not)."""
        return all(error <= self.tolerance for error in self.errors.values())


@dataclass
class Report:
    """Everything the steps found."""

    options: Options
    created: str
    machine: benchmark.Machine
    versions: benchmark.Versions
    commit: str | None
    backends: dict[str, str | None]  # None: available; else the reason why not
    error_rows: list[ErrorRow]
    speeds: benchmark.Results
    history: History
    score: Score
    generation: GenerationCheck
    seconds: dict[str, float]  # of each step
    failures: list[str] = field(default_factory=list)


class Steps:
    """Headings with numbers, and the seconds that each step took."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.total = total
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str, heading: str) -> Iterator[None]:
        """Print the heading before the block, and keep the time of the block under ``name``."""
        self.console.rule(
            f"[bold]{len(self.seconds) + 1} of {self.total}  {heading}", align="left", style="dim"
        )
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def run_demo(options: Options, console: Console) -> int:
    """Do all the steps; 0 when the goal was reached and every check held, 1 otherwise.

    The last line printed is ``exact match NN.N%``.
    """
    steps = Steps(console, 6)
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with steps.step("machine", "This machine and the backends"):
        machine, versions = benchmark.describe_machine(), benchmark.describe_versions()
        backends = dispatch.status()
        show_machine(console, options, machine, versions, backends)
    with steps.step("errors", "Every backend against float64"):
        error_rows = measure_errors(options, [n for n, why in backends.items() if why is None])
        show_errors(console, error_rows)
    with steps.step("speed", "Time and peak memory, beside PyTorch"):
        speeds = measure_speed(options, console)
        show_speed(console, speeds)
    with steps.step("training", f"English dates into {len(LANGUAGES)} languages"):
        task, translator, history = train_translator(options, console)
        score = test_translator(task, translator, console)
    with steps.step("generation", "Generating: greedy and beams, with and without cache"):
        generation = measure_generation(options, task, translator)
        show_generation(console, generation)
    report = Report(
        options=options,
        created=created,
        machine=machine,
        versions=versions,
        commit=benchmark.git_commit(),
        backends=backends,
        error_rows=error_rows,
        speeds=speeds,
        history=history,
        score=score,
        generation=generation,
        seconds=steps.seconds,
    )
    with steps.step("report", "Pictures and the page"):
        page = write_report(report, task, translator)
        console.print(f"{page.parent}/: {', '.join(sorted(p.name for p in page.parent.iterdir()))}")
        console.print(f"open {page}", style="bold")
    report.failures = find_failures(report)
    for failure in report.failures:
        console.print(f"FAILED: {failure}", style="bold red", highlight=False)
    console.print(f"{sum(steps.seconds.values()):.0f} s in all", style="dim")
    console.print(f"exact match {percent(score.translations_share)}", highlight=False, style="bold")
    return 1 if report.failures else 0


def percent(share: float) -> str:
    """``99.5%``; rounded down, so that a goal is never reached by rounding."""
    return f"{int(share * 1000 + 1e-9) / 10:.1f}%"


def find_failures(report: Report) -> list[str]:
    """What should have held and did not, as sentences."""
    failures = [
        f"{row.backend} {row.dtype} is off by more than {row.tolerance:g}: {row.errors}"
        for row in report.error_rows
        if not row.right
    ]
    if report.generation.different:
        failures.append(
            f"{report.generation.different} of {report.generation.rows} generated sequences differ "
            "with and without the cache"
        )
    if report.score.translations_share < GOAL and not report.options.quick:
        failures.append(
            f"{percent(report.score.translations_share)} of the translations of "
            f"{report.score.dates} held-out dates are exact, the goal is {percent(GOAL)}"
        )
    return failures


# --- 1: the machine ----------------------------------------------------------------------------


def show_machine(
    console: Console,
    options: Options,
    machine: benchmark.Machine,
    versions: benchmark.Versions,
    backends: dict[str, str | None],
) -> None:
    """Print the machine, the versions and each backend with its state."""
    console.print(machine_line(machine))
    console.print(version_line(versions))
    for name, reason in backends.items():
        state = "[green]available" if reason is None else f"[yellow]not available: {reason}"
        console.print(f"  backend {name}: {state}", highlight=False)
    console.print(f"running on {options.device}, seed {options.seed}", highlight=False)


def machine_line(machine: benchmark.Machine) -> str:
    """The machine in one line."""
    parts = [
        machine.cpu,
        f"{_count(machine.threads, 'thread')} on {_count(machine.cores, 'core')}",
        machine.instruction_set,
        f"{machine.memory_bytes / 2**30:.0f} GiB",
        *machine.gpus,
    ]
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def version_line(versions: benchmark.Versions) -> str:
    """The software in one line."""
    built = f"built by {versions.compiler}" if versions.compiler else "without its C++ extension"
    return f"attnkit {versions.attnkit} ({built}), torch {versions.torch}, Python {versions.python}"


# --- 2: exactness ------------------------------------------------------------------------------


def measure_errors(options: Options, backends: Sequence[str]) -> list[ErrorRow]:
    """Output and gradients of every backend, and of the naive way, on causal and padded cases."""
    length = 65 if options.quick else 321  # no multiple of any tile
    shape = Case(2, 4, length, 64, kv_heads=2, device=options.device)
    rows = []
    for dtype in DTYPES:
        cases = [replace(shape, dtype=dtype, mask=mask) for mask in ("causal", "padded")]
        subjects = [benchmark.Subject.of(case, options.seed) for case in cases]
        names = [*(f"attnkit:{backend}" for backend in backends), "naive"]
        rows += [_error_row(name, dtype, subjects) for name in names]
    return rows


def _error_row(name: str, dtype: str, subjects: Sequence[benchmark.Subject]) -> ErrorRow:
    row = ErrorRow(name.removeprefix("attnkit:"), dtype, benchmark.TOLERANCE[dtype])
    for subject in subjects:
        try:
            work = benchmark.prepare(name, "step", subject.case, subject.inputs)
            found = benchmark.errors(work.results(), subject.true)
        except NotImplementedError as refusal:  # what a backend raises for what it does not serve
            return replace(row, errors={}, refusal=str(refusal))
        for tensor, error in found.items():
            worst = row.errors.get(tensor, 0.0)
            row.errors[tensor] = error if error != error else max(worst, error)  # keeps a NaN
    return row


def show_errors(console: Console, rows: Sequence[ErrorRow]) -> None:
    """Print a table of the errors."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("dtype", "backend"):
        table.add_column(heading)
    for heading in ("out", "dq", "dk", "dv", "at most"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        cells = [
            f"{row.errors[n]:.1e}" if n in row.errors else "" for n in ("out", "dq", "dk", "dv")
        ]
        verdict = row.refusal or ("[green]right" if row.right else "[red]WRONG")
        table.add_row(row.dtype, row.backend, *cells, f"{row.tolerance:.0e}", verdict)
    console.print(table)
    console.print(
        "largest error of a row, relative to its norm; causal and padded, 4 query and 2 key heads",
        style="dim",
    )


# --- 3: speed ----------------------------------------------------------------------------------


def measure_speed(options: Options, console: Console) -> benchmark.Results:
    """Forward and backward of attnkit, PyTorch's SDPA and the naive way, interleaved."""
    with console.status("measuring") as status:
        return benchmark.run(options.speed, progress=lambda text: status.update(text))


def show_speed(console: Console, results: benchmark.Results) -> None:
    """Print time, speed beside PyTorch's and memory of every row."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("case", "pass", "implementation"):
        table.add_column(heading)
    for heading in ("median ms", "x PyTorch", "of peak", "peak extra MiB"):
        table.add_column(heading, justify="right")
    for cells in speed_cells(results):
        style = "bold" if cells[2].startswith("attnkit") else None
        table.add_row(*cells, style=style)
    console.print(table)
    console.print(peak_line(results), style="dim")


def peak_line(results: benchmark.Results) -> str:
    """What "of peak" refers to."""
    kinds = {row.peak.kind for row in results.rows if row.peak is not None}
    names = {
        "fma": "of peak: fp32 multiply-adds of this machine, probed in the same rounds",
        "matmul": "of peak: PyTorch's fp32 matrix product, timed in the same rounds",
    }
    return "; ".join(names[kind] for kind in sorted(kinds)) or "no peak is probed on this device"


def speed_cells(results: benchmark.Results) -> list[list[str]]:
    """The rows of the speed table: case, pass, implementation, ms, ratio, share of peak, MiB."""
    rows = []
    for row in results.rows:
        name = viz.IMPLEMENTATION_NAMES[row.implementation]
        if row.implementation == "attnkit":
            name += f" ({row.backend})"
        ratio, share = results.ratio(row), row.share_of_peak
        rows.append(
            [
                row.group.removesuffix(" " + row.operation),
                row.operation,
                name,
                viz.milliseconds(row.samples.median),
                "" if ratio is None else f"{ratio.median:.2f}",
                "" if share is None else f"{share:.0%}",
                "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}",
            ]
        )
    return rows


# --- 4: training -------------------------------------------------------------------------------


def train_translator(options: Options, console: Console) -> tuple[Task, Translator, History]:
    """Prepare the dates and train until the validation dates are right, with progress shown."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    recipe = options.recipe
    task = Task.prepare(recipe)
    split, example = task.split, make_example(task.split.test[0], "hu")
    console.print(
        f"{len(split.train):,} dates to train on; held out in every language: "
        f"{len(split.validation):,} to validate, {len(split.test):,} to test; "
        f"{task.tokenizer.vocab_size} subwords, learnt by tokenizers",
        highlight=False,
    )
    console.print(f"for example: {example.source} -> {example.target}", highlight=False)
    with Progress(
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}% of validation right, {task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        bar = progress.add_task("", total=1.0)

        def on_step(history: History) -> None:
            text = f"step {history.steps}, loss {history.losses[-1]:.3f}"
            progress.update(bar, description=text)

        def on_validation(history: History, score: Score) -> None:
            progress.update(bar, completed=score.translations_share)
            console.print(
                f"  step {history.steps:4d}: loss {history.losses[-1]:.3f}, "
                f"{score.right} of {score.dates} validation dates right in every language "
                f"({percent(score.translations_share)} of translations), {history.seconds:.0f} s",
                highlight=False,
            )

        translator, history = train(
            task, recipe, options.device, on_step=on_step, on_validation=on_validation
        )
    parameters = sum(p.numel() for p in translator.model.parameters())
    console.print(
        f"{parameters:,} parameters, {history.steps} steps, {history.tokens:,} tokens in "
        f"{history.seconds:.0f} s",
        highlight=False,
    )
    return task, translator, history


def test_translator(task: Task, translator: Translator, console: Console) -> Score:
    """Translate the test dates, once, into every language."""
    score = translator.score(every_language(task.split.test))
    console.print(
        f"test: {score.right} of {score.dates} held-out dates right in all {len(LANGUAGES)} "
        f"languages; {score.translations - len(score.mistakes):,} of {score.translations:,} "
        "translations",
        highlight=False,
    )
    for mistake in score.mistakes[:5]:
        example = mistake.example
        console.print(
            f"  {LANGUAGES[example.language]}: {example.source} -> {mistake.found!r}, "
            f"right is {example.target!r}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return score


# --- 5: generation -----------------------------------------------------------------------------


def measure_generation(options: Options, task: Task, translator: Translator) -> GenerationCheck:
    """Tokens per second of four ways to generate the same translations."""
    days = task.split.test[: 1 if options.quick else 16]
    return generation_speeds(
        translator, every_language(days), num_beams=NUM_BEAMS, rounds=1 if options.quick else 3
    )


def show_generation(console: Console, generation: GenerationCheck) -> None:
    """Print the speeds, and whether the cache changed a token."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("search")
    table.add_column("cache")
    table.add_column("tokens/s", justify="right")
    for search, cache, rate in generation_cells(generation):
        table.add_row(search, cache, rate)
    console.print(table)
    same = generation.rows - generation.different
    console.print(
        f"{same} of {generation.rows} sequences are the same with and without the cache",
        highlight=False,
    )


def generation_cells(generation: GenerationCheck) -> list[list[str]]:
    """The rows of the generation table: search, cache, tokens per second."""
    return [
        [
            "greedy" if speed.num_beams == 1 else f"{speed.num_beams} beams",
            "with" if speed.use_cache else "without",
            f"{speed.tokens_per_second:,.0f}",
        ]
        for speed in generation.speeds
    ]


# --- 6: pictures, page, numbers ----------------------------------------------------------------


def write_report(report: Report, task: Task, translator: Translator) -> Path:
    """Write pictures, page, numbers and the trained model; returns the page's path."""
    folder = report.options.output
    folder.mkdir(parents=True, exist_ok=True)
    recipe, history = report.options.recipe, report.history
    caption = f"{machine_line(report.machine)} · torch {report.versions.torch} · {report.created}"
    curves = viz.training_curves(
        history.losses,
        history.learning_rates,
        {
            "dates right in every language": [(v.step, v.dates) for v in history.validations],
            "translations right": [(v.step, v.translations) for v in history.validations],
        },
        folder / "training.png",
        floor=recipe.loss_floor(task.tokenizer.vocab_size),
        target=GOAL,
        title="Training on dates",
        caption=caption,
    )
    bars = viz.speed_bars(
        report.speeds,
        folder / "speed.png",
        title="Attention: time and memory",
        caption=caption,
    )
    day = telling_day(task)
    maps = {
        found.example.language: viz.HeatMap(
            LANGUAGES[found.example.language], found.weights, found.rows, found.columns
        )
        for found in alignments(translator, every_language([day]))
    }
    attention = viz.heat_maps(
        [maps[code] for code in renderable(maps)],
        folder / "attention.png",
        row_label="token written",
        column_label="English token looked at",
        title="Cross-attention of the last decoder layer, mean of its heads",
        caption=caption,
    )
    days = dict.fromkeys((day, *task.split.test[:2]))
    shown = [make_example(each, code) for code in LANGUAGES for each in days]
    translations = list(zip(shown, translator.translate(shown), strict=True))
    report.speeds.save(folder / "benchmark.json")
    (folder / "results.json").write_text(
        json.dumps(numbers(report), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    translator.save_pretrained(folder / "model")
    content = {
        "report": report,
        "goal": percent(GOAL),
        "exact": percent(report.score.translations_share),
        "machine": machine_line(report.machine),
        "versions": version_line(report.versions),
        "languages": LANGUAGES,
        "recipe": recipe,
        "parameters": sum(p.numel() for p in translator.model.parameters()),
        "train_dates": len(task.split.train),
        "vocab_size": task.tokenizer.vocab_size,
        "speed_cells": speed_cells(report.speeds),
        "peak_line": peak_line(report.speeds),
        "generation_cells": generation_cells(report.generation),
        "translations": translations,
        "maps": maps,
        "pictures": {"training": curves, "speed": bars, "attention": attention},
    }
    return viz.write_page(folder / "index.html", content)


def telling_day(task: Task) -> datetime.date:
    """The first test date whose day and year have no digit in common and no digit twice."""
    for day in task.split.test:
        digits = f"{day.day}{day.year}"
        if day.day > 9 and len(set(digits)) == len(digits):
            return day
    return task.split.test[0]


def renderable(maps: dict[str, viz.HeatMap], most: int = 4) -> list[str]:
    """The first of FIGURE_LANGUAGES whose tokens the installed fonts can draw."""
    some = [code for code in FIGURE_LANGUAGES if viz.fonts_for("".join(maps[code].rows))]
    return some[:most]


def numbers(report: Report) -> dict[str, Any]:
    """Everything measured, as JSON can hold it."""
    score, history = report.score, report.history
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "created": report.created,
        "seed": report.options.seed,
        "device": report.options.device,
        "quick": report.options.quick,
        "machine": asdict(report.machine),
        "versions": asdict(report.versions),
        "commit": report.commit,
        "backends": report.backends,
        "errors": [asdict(row) for row in report.error_rows],
        "recipe": asdict(report.options.recipe),
        "training": asdict(history)
        | {
            "steps": history.steps,
            "validations": [validation._asdict() for validation in history.validations],
        },
        "test": {
            "dates": score.dates,
            "dates_exact": score.right,
            "exact_match": score.translations_share,
            "translations": score.translations,
            "translations_exact": score.translations - len(score.mistakes),
            "mistakes": [
                {
                    "language": mistake.example.language,
                    "source": mistake.example.source,
                    "expected": mistake.example.target,
                    "found": mistake.found,
                }
                for mistake in score.mistakes
            ],
        },
        "generation": [
            speed._asdict() | {"tokens_per_second": speed.tokens_per_second}
            for speed in report.generation.speeds
        ],
        "seconds": report.seconds,
    }
