"""The command ``attnkit``: demo, train, generate, heatmap, bench, report, info, verify, explain."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnkit import __version__, dispatch, functional, masks
from attnkit.backends import cpu, cuda
from attnkit.benchmark import command

if TYPE_CHECKING:
    from rich.console import Console

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
DEMO_MODULES = ("babel", "tokenizers", "rich", "matplotlib")  # of the extra attnkit[demo]
GENERATE_MODULES = ("tokenizers",)
HEATMAP_MODULES = ("tokenizers", "matplotlib")
BENCH_MODULES = ("rich",)  # of the extra attnkit[bench]
REPORT_MODULES = ("matplotlib", "jinja2")
RECIPES = {  # modules with SUMMARY, MODULES, Options and main(options, console)
    "translate": "attnkit.recipes.translate",
    "lm": "attnkit.recipes.language_model",
    "classify": "attnkit.recipes.classify",
}
ENVIRONMENT = {
    "ATTNKIT_CPU_ISA": "forces an instruction set of the CPU kernels (names below)",
    "ATTNKIT_BUILD_EXT": "0, when installing: leaves the C++ extension out",
    "ATTNKIT_CUDA": "0, when installing: leaves the CUDA kernels out",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (without the program's name); returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        status: int = options.run(options.parser, options)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `attnkit info | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell calls an end by SIGPIPE
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``parser`` and ``run(parser, options)``."""
    parser = argparse.ArgumentParser(
        prog="attnkit", description="Exact attention for PyTorch, on kernels of its own."
    )
    parser.add_argument("--version", action="version", version=f"attnkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a Transformer to write dates in 14 languages, and show what it does",
        description=(
            "Check every backend against float64, time attention beside PyTorch's, train an "
            "encoder-decoder on dates, generate with it, and write pictures and one HTML page. "
            "Minutes on two cores. The exit status is 0 only if every check held and at least "
            "99.5%% of the held-out dates were translated exactly."
        ),
    )
    demo.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="folder (default: %(default)s)"
    )
    demo.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    demo.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    demo.add_argument(
        "--quick",
        action="store_true",
        help="every step with tiny sizes and next to no training, held to no goal: seconds",
    )
    demo.set_defaults(run=run_demo, parser=demo)

    train = commands.add_parser(
        "train",
        help="train a model on text: translate, lm, classify",
        description=(
            "Train a Transformer on your text, or on data that is at hand. Under torchrun several "
            "processes train together. `attnkit train RECIPE --help` has what a recipe takes."
        ),
    )
    train.add_argument("recipe", choices=RECIPES, metavar="RECIPE", help=", ".join(RECIPES))
    train.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    train.set_defaults(run=run_train, parser=train)

    generate = commands.add_parser(
        "generate",
        help="write text with a trained model",
        description="Write text with the model of a run, and show it as it comes.",
    )
    add = generate.add_argument
    add("--model", type=Path, required=True, help="folder of a run, such as runs/lm")
    add("--prompt", default="", help="how the text begins; for a translation, its source")
    add("--max-length", type=int, metavar="N", help="the most tokens written (default: all)")
    add("--num-beams", type=int, default=1, metavar="N", help="of beam search (default: 1)")
    add("--temperature", type=float, metavar="X", help="draw tokens; lower is tamer")
    add("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens only")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest of mass P only")
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    generate.set_defaults(run=run_generate, parser=generate)

    heatmap = commands.add_parser(
        "heatmap",
        help="draw where the heads of a trained model look",
        description=(
            "Draw the attention weights of a run's model for one text: those of a layer, or, "
            "without --layer, small maps of all layers, with a second picture of what their heads "
            "do (entropy, distance, weight on the first key)."
        ),
    )
    add = heatmap.add_argument
    add("--model", type=Path, required=True, help="folder of a run, such as runs/translate")
    add("--text", required=True, help="what the model reads; for a translation, its source")
    add("--target", help="a translation of the text (default: the model's own)")
    add("--layer", type=int, metavar="N", help="from 0, or from the end: -1 (default: all)")
    add("--head", type=int, metavar="N", help="of the layer (default: all)")
    add(
        "--kind",
        choices=("cross", "self", "encoder"),
        help="of a translation: of target to source (default), of target, of source to itself",
    )
    add(
        *("-o", "--output"),
        type=Path,
        default=Path("heatmap.png"),
        metavar="FILE",
        help="the picture, a PNG (default: %(default)s)",
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    heatmap.set_defaults(run=run_heatmap, parser=heatmap)

    bench = commands.add_parser(
        "bench",
        help="measure attnkit beside PyTorch and other libraries, on presets or your own shapes",
        description=(
            "Check the numbers of every implementation, then time them in interleaved rounds. What "
            "do I gain: attnkit bench --shape 8,32,4096,128 --dtype bf16 --causal --window 1024"
        ),
    )
    command.add_arguments(bench)
    bench.set_defaults(run=run_bench, parser=bench)

    report = commands.add_parser(
        "report",
        help="make a page, a table and pictures of measured results",
        description="Write index.html (one page, needs no network), results.md and PNGs.",
    )
    report.add_argument("results", type=Path, help="a file that attnkit bench --json wrote")
    report.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("report"),
        metavar="FOLDER",
        help="where to (default: %(default)s)",
    )
    report.set_defaults(run=run_report, parser=report)

    info = commands.add_parser(
        "info", help="print versions, machine, backends, and why a backend is not available"
    )
    info.set_defaults(run=run_info, parser=info)

    verify = commands.add_parser(
        "verify",
        help="check every kernel of this machine against float64, in half a minute",
        description=(
            "Outputs, every gradient, decoding, appending to caches, and the bits that are "
            "promised: on every backend that this machine has, and with every instruction set. "
            "What there is no time for is left out, and the summary says so. "
            "The exit status is 1 if anything is wrong. With `attnkit info` it is what a report "
            "of a bug should contain."
        ),
    )
    verify.add_argument(
        "--seconds", type=float, default=30.0, metavar="N", help="time to take (default: 30)"
    )
    verify.set_defaults(run=run_verify, parser=verify)

    explain = commands.add_parser(
        "explain",
        help="print which backend would serve a call, and what the others have against it",
        description="Which backend would attnkit.attention use for a call with these arguments?",
    )
    explain.add_argument(
        "--query", type=int, nargs=4, metavar=("B", "H", "L", "D"), default=(1, 8, 1024, 64)
    )
    explain.add_argument("--keys", type=int, metavar="N", help="number of keys (default: L)")
    explain.add_argument("--kv-heads", type=int, metavar="N", help="heads of key and value")
    explain.add_argument("--value-dim", type=int, metavar="N", help="head dim of value")
    explain.add_argument("--dtype", choices=DTYPES, default="fp32")
    explain.add_argument("--device", default="cpu")
    explain.add_argument("--backend", metavar="NAME", help="force this backend")
    explain.add_argument("--causal", action="store_true", help="query i sees keys j <= i")
    explain.add_argument(
        "--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="sliding window"
    )
    explain.add_argument("--padding", action="store_true", help="a length for each sequence")
    explain.add_argument("--bias", action="store_true", help="a dense bias [1, H, L, S]")
    explain.add_argument("--sinks", action="store_true", help="a learnable sink for each head")
    explain.add_argument("--alibi", action="store_true", help="a slope for each head")
    explain.add_argument("--softcap", type=float, default=0.0, metavar="X")
    explain.add_argument("--dropout", type=float, default=0.0, metavar="P")
    explain.set_defaults(run=run_explain, parser=explain)
    return parser


# --- demo --------------------------------------------------------------------------------------


def run_demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit demo``."""
    if not _installed("demo", DEMO_MODULES, extra="demo"):
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(parser, device)

    from attnkit.recipes.demo import Options, run_demo

    return run_demo(
        Options(
            output=options.output,
            seed=options.seed,
            device=device,
            quick=options.quick,
        ),
        _console(),
    )


def _installed(command: str, modules: Sequence[str], extra: str) -> bool:
    """Whether ``modules`` can be imported; says which cannot, and which extra has them."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"attnkit {command} needs {', '.join(missing)}, not installed here: "
            f"pip install 'attnkit[{extra}]'",
            file=sys.stderr,
        )
    return not missing


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe: room for the tables, and nothing cut
        console = Console(highlight=False, width=120)
    return console


def _check_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        words = str(error).splitlines()[0][:60]
        parser.error(f"argument --device: {name!r} is not a device ({words}...)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(
            f"argument --device: {name!r}, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return device


# --- train, generate, heatmap ------------------------------------------------------------------


def run_train(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit train``: the recipe has the flags, and only the one that runs is imported."""
    from attnkit.recipes.options import UsageError

    recipe = importlib.import_module(RECIPES[options.recipe])
    parser = argparse.ArgumentParser(
        prog=f"attnkit train {options.recipe}", description=f"Train {recipe.SUMMARY}."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON or TOML with these keys")
    recipe.Options.add_arguments(parser)
    flags = vars(parser.parse_args(options.flags))
    config = flags.pop("config")
    try:
        chosen = recipe.Options.from_command_line(flags, config)
        if chosen.device:
            _check_device(parser, chosen.device)
        if not _installed(f"train {options.recipe}", recipe.MODULES, extra="train"):
            return 2
        status: int = recipe.main(chosen, _console())
    except UsageError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("stopped; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return status


def run_generate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit generate``."""
    _check_device(parser, options.device)
    if not _installed("generate", GENERATE_MODULES, extra="train"):
        return 2
    from attnkit.recipes import generate
    from attnkit.recipes.options import UsageError

    try:
        return generate.main(options)
    except UsageError as error:
        parser.error(str(error))


def run_heatmap(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit heatmap``."""
    _check_device(parser, options.device)
    if not _installed("heatmap", HEATMAP_MODULES, extra="train"):
        return 2
    from attnkit.recipes import heatmap
    from attnkit.recipes.options import UsageError

    try:
        return heatmap.main(options)
    except UsageError as error:
        parser.error(str(error))


# --- bench, report -----------------------------------------------------------------------------


def run_bench(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit bench``."""
    if not _installed("bench", BENCH_MODULES, extra="bench"):
        return 2
    _check_device(parser, options.device)
    return command.main(parser, options)


def run_report(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit report``."""
    if not _installed("report", REPORT_MODULES, extra="bench"):
        return 2
    from attnkit.benchmark import report
    from attnkit.benchmark.results import Results

    try:
        results = Results.load(options.results)
    except OSError as error:
        parser.error(f"argument results: {options.results}: {error.strerror}")
    except ValueError as error:
        parser.error(f"argument results: {options.results}: {error}")
    for path in report.write(results, options.output):
        print(path)
    return 0


# --- info --------------------------------------------------------------------------------------


def run_info(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit info``."""
    from attnkit.benchmark.machine import describe_machine, describe_versions, git_commit

    machine, versions = describe_machine(), describe_versions()
    rows = [
        ("attnkit", versions.attnkit),
        ("commit", git_commit() or "not in a checkout of its own"),
        ("torch", versions.torch),
        ("Python", f"{versions.python} ({sys.executable})"),
        ("compiler", versions.compiler or "none: the C++ extension was not built"),
        ("system", f"{machine.system} {machine.architecture}"),
        ("processor", machine.cpu),
        ("cores, threads", f"{machine.cores}, {machine.threads}"),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("CPU flags", " ".join(machine.flags) or "none that matter"),
        ("CUDA devices", ", ".join(machine.gpus) or "none"),
    ]
    print_rows(rows)
    print("\nbackends, in the order in which they are tried")
    print_rows(
        [
            (f"  {name}", "available" if reason is None else f"not available: {reason}")
            for name, reason in dispatch.status().items()
        ]
    )
    print("\nCPU kernels")
    if cpu.BUILT:
        print_rows(
            [
                ("  instruction set", cpu.instruction_set()),
                ("  can be forced", " ".join(cpu.available_isas())),
            ]
        )
    else:
        print(f"  not built: {build_reason()}")
    print("\nCUDA kernels")
    print("  built" if cuda.BUILT else f"  not built: {build_reason('CUDA_REASON')}")
    print("\nenvironment variables")
    print_rows(
        [
            (f"  {name}", f"{os.environ.get(name, 'not set')}  ({meaning})")
            for name, meaning in ENVIRONMENT.items()
        ]
    )
    return 0


def build_reason(name: str = "REASON") -> str:
    """Why an extension is missing, as the build noted it."""
    if importlib.util.find_spec("attnkit._build_info") is None:
        return "nothing was built in this checkout (pip install . or make)"
    from attnkit import _build_info

    return getattr(_build_info, name, "") or "its file is gone; install attnkit again"


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print name and value in two columns."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


# --- verify ------------------------------------------------------------------------------------


def run_verify(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit verify``."""
    from attnkit import verify

    if not options.seconds > 0:
        parser.error(f"argument --seconds: {options.seconds:g}, expected more than 0")
    return verify.main(options.seconds)


# --- explain -----------------------------------------------------------------------------------


def run_explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """``attnkit explain``; the exit status is 1 when no backend (or not the forced one) serves."""
    batch, heads, queries, dim = options.query
    keys = queries if options.keys is None else options.keys
    kv_heads = heads if options.kv_heads is None else options.kv_heads
    value_dim = dim if options.value_dim is None else options.value_dim
    for name, size in (
        ("--query", min(options.query)),
        ("--keys", keys),
        ("--kv-heads", kv_heads),
        ("--value-dim", value_dim),
    ):
        if size < 0:
            parser.error(f"argument {name}: {size}, expected no negative size")
    if options.backend is not None and options.backend not in dispatch.BACKENDS:
        known = ", ".join(dispatch.BACKENDS)
        parser.error(f"argument --backend: {options.backend!r}, expected one of {known}")
    device, dtype = _check_device(parser, options.device), DTYPES[options.dtype]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    mask = masks.Mask()
    if options.causal:
        mask = mask & masks.causal()
    if options.window:
        mask = mask & masks.sliding_window(*options.window)
    if options.padding:
        lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
        mask = mask & masks.padding(lengths)
    try:
        answers = functional.explain(
            empty(batch, heads, queries, dim),
            empty(batch, kv_heads, keys, dim),
            empty(batch, kv_heads, keys, value_dim),
            mask=mask,
            bias=empty(1, heads, queries, keys) if options.bias else None,
            sinks=empty(heads, dtype=torch.float32) if options.sinks else None,
            alibi=empty(heads, dtype=torch.float32) if options.alibi else None,
            softcap=options.softcap,
            dropout_p=options.dropout,
        )
    except (RuntimeError, ValueError, TypeError) as error:  # the door's own words say what is wrong
        parser.error(f"such a call is refused: {error}")
    chosen = options.backend if options.backend is not None else answers.chosen
    for name, reason in answers.items():
        mark = "->" if name == chosen and reason is None else "  "
        print(f"{mark} {name}: {'can serve the call' if reason is None else reason}")
    if chosen is None or answers[chosen] is not None:
        print("no backend serves the call" if chosen is None else f"{chosen} cannot serve the call")
        return 1
    if answers.note:
        print(f"note: {answers.note}")
    return 0
