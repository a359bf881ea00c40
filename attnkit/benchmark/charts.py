"""Pictures of results: each says where and when it was measured, and in which units.

An implementation has one colour (of Okabe and Ito's, told apart whatever one's colour vision) and
one marker, in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit import viz
from attnkit.benchmark.machine import headline
from attnkit.benchmark.memory import loglog_slope
from attnkit.benchmark.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SKY, VERMILION, YELLOW, BLACK = "#56B4E9", "#D55E00", "#B8A800", "#000000"
LOOKS: dict[str, tuple[str, str]] = {  # colour and marker
    "attnkit": (viz.BLUE, "o"),
    "torch": (viz.ORANGE, "s"),
    "naive": (viz.GREY, "^"),
    "torch:folded": (VERMILION, "v"),
    "torch-loop": (VERMILION, "<"),
    "torch-eager": (YELLOW, "s"),
    "torch:math": (YELLOW, ">"),
    "torch:flash": (VERMILION, "D"),
    "torch:efficient": (YELLOW, "P"),
    "torch:cudnn": (BLACK, "D"),
    "flex": (viz.GREEN, "D"),
    "onnxruntime": (viz.PINK, "p"),
    "openvino": (SKY, "h"),
    "flash-attn": (viz.PINK, "X"),
    "xformers": (SKY, "P"),
    "flashinfer": (BLACK, "*"),
    "hf:eager": (viz.GREY, "v"),
    "hf:sdpa": (viz.ORANGE, "D"),
    "attnkit-padded": (SKY, "o"),
    "attnkit-eager": (SKY, "D"),
}
OTHER = (BLACK, "+")
ATTENTION = ("forward", "backward", "step")
LEAST_POINTS = 3  # of a line against the length
MOST_PANELS = 6
MOST_BARS = 28  # of one picture


def draw_all(results: Results, folder: Path) -> dict[str, list[Path]]:
    """Draw what the rows have data for, as PNGs in ``folder``; by kind of picture."""
    pictures = {
        "speedup": speedups(results, folder),
        "throughput": throughput(results, folder),
        "memory": memory(results, folder),
        "decode": decode(results, folder),
        "features": features(results, folder),
        "accuracy": accuracy(results, folder),
    }
    return {kind: paths for kind, paths in pictures.items() if paths}


def caption(results: Results) -> str:
    """Machine, versions, date and commit, in two lines."""
    commit = f", commit {results.commit[:12]}" if results.commit else ""
    return f"{headline(results.machine, results.versions)}\n{results.created}{commit}"


# --- against the length --------------------------------------------------------------------------


def throughput(results: Results, folder: Path) -> list[Path]:
    """GFLOP/s of attention against the length, with the machine's roof."""
    panels = _panels(row for row in results.rows if row.suite in ATTENTION)

    def fill(axis: Axes, rows: Sequence[Row]) -> None:
        for name, line in _lines(rows):
            sizes = [row.shape["keys"] for row in line]
            axis.plot(sizes, [row.gflops for row in line], label=name, **_style(name))
        _roof(axis, rows, 1e9, "GFLOP/s")
        axis.set_ylim(bottom=0)
        axis.set_ylabel("GFLOP/s (fastest call)")

    return _grid(results, panels, fill, folder / "throughput.png", "Throughput against length")


def memory(results: Results, folder: Path) -> list[Path]:
    """Peak memory against the length, both logarithmic, with the slope of each line."""
    kept = [row for row in results.rows if row.suite in ATTENTION and row.extra_bytes]
    panels = _panels(kept)

    def fill(axis: Axes, rows: Sequence[Row]) -> None:
        for name, line in _lines(rows):
            sizes = [row.shape["keys"] for row in line]
            values = [(row.extra_bytes or 0) / 2**20 for row in line]
            slope = loglog_slope(sizes, values) if len(set(sizes)) > 1 else math.nan
            axis.plot(sizes, values, label=f"{name}, slope {slope:.2f}", **_style(name))
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_ylabel("MiB beyond the inputs")
        axis.legend(fontsize=7, frameon=False)

    title = "Peak memory against length (slope 1: linear, 2: quadratic)"
    return _grid(results, panels, fill, folder / "memory.png", title, legend=False)


def decode(results: Results, folder: Path) -> list[Path]:
    """GB/s of decoding against the context, with the rate at which memory is read."""
    panels = _panels(row for row in results.rows if row.suite == "decode")

    def fill(axis: Axes, rows: Sequence[Row]) -> None:
        for name, line in _lines(rows):
            sizes = [row.shape["keys"] for row in line]
            axis.plot(sizes, [row.gigabytes or 0.0 for row in line], label=name, **_style(name))
        _roof(axis, rows, 1e9, "GB/s")
        axis.set_ylim(bottom=0)
        axis.set_ylabel("GB/s of keys and values (fastest call)")

    return _grid(
        results, panels, fill, folder / "decode.png", "Decoding: bandwidth against context",
        across="tokens in the cache",
    )  # fmt: skip


def _panels(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that differ in their length alone, where there are enough lengths, by title."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        shape = row.shape
        queries = shape["queries"] if row.suite == "decode" else 0
        key = (
            *(row.suite, row.operation, shape["heads"], shape["kv_heads"], shape["head_dim"]),
            *(queries, row.dtype, row.mask, row.device),
        )
        found.setdefault(key, []).append(row)
    panels = []
    for key, some in found.items():
        batches = sorted({row.shape["batch"] for row in some})
        tokens = {row.shape["batch"] * row.shape["keys"] for row in some}
        by_batch = [some]
        if len(tokens) > 1 and len(batches) > 1:  # not a grid that keeps the number of tokens
            by_batch = [[row for row in some if row.shape["batch"] == b] for b in batches]
        panels += [
            (_title(key, part), part)
            for part in by_batch
            if len({row.shape["keys"] for row in part}) >= LEAST_POINTS
        ]
    return panels


def _title(key: tuple[Any, ...], rows: Sequence[Row]) -> str:
    _, operation, heads, kv_heads, dim, _, dtype, mask, _ = key
    batches = sorted({row.shape["batch"] for row in rows})
    batch = f"B{batches[0]}" if len(batches) == 1 else f"B{batches[0]} to {batches[-1]}"
    both = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
    return f"{operation}, {batch} H{both} D{dim} {dtype} {mask}"


def _lines(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by implementation, in the order of LOOKS, each by length."""
    names = sorted({row.implementation for row in rows}, key=_rank)
    return [
        (name, sorted((r for r in rows if r.implementation == name), key=lambda r: r.shape["keys"]))
        for name in names
    ]


def _roof(axis: Axes, rows: Sequence[Row], unit: float, label: str) -> None:
    peaks = [row.peak for row in rows if row.peak is not None]
    if not peaks:
        return
    top = max(peaks, key=lambda peak: peak.best)
    axis.axhline(top.best / unit, color="black", linestyle="--", linewidth=1)
    axis.annotate(
        f"roof: {top.best / unit:.3g} {label} ({top.kind}, same rounds)",
        (0.01, top.best / unit),
        xycoords=("axes fraction", "data"),
        xytext=(2, 3),
        textcoords="offset points",
        fontsize=7,
    )
    axis.set_ymargin(0.12)


def _grid(
    results: Results,
    panels: Sequence[tuple[str, list[Row]]],
    fill: Callable[[Axes, Sequence[Row]], None],
    path: Path,
    title: str,
    *,
    across: str = "length",
    legend: bool = True,
) -> list[Path]:
    """One picture of at most MOST_PANELS panels, each against the length."""
    paths = []
    for number, some in enumerate(_chunks(panels, MOST_PANELS)):
        columns = min(2, len(some))
        lines = -(-len(some) // columns)
        figure = viz.new_figure(max(6.4, 5.0 * columns), 0.9 + 3.4 * lines)
        axes = figure.subplots(lines, columns, squeeze=False)
        for axis in axes.flat[len(some) :]:
            axis.set_visible(False)
        for axis, (name, rows) in zip(axes.flat, some, strict=False):
            fill(axis, rows)
            axis.set_title(name, fontsize=9)
            axis.set_xscale("log", base=2)
            ticks = sorted({row.shape["keys"] for row in rows})
            axis.set_xticks(ticks, [f"{tick}" for tick in ticks])
            axis.minorticks_off()
            axis.set_xlabel(f"{across} (logarithmic)")
            _tidy(axis, "both")
        _legend(figure, title, axes.flat[: len(some)] if legend else ())
        paths.append(viz.save(figure, _numbered(path, number), caption(results)))
    return paths


# --- bars ----------------------------------------------------------------------------------------


def speedups(results: Results, folder: Path) -> list[Path]:
    """Speed of attnkit beside the baseline of each group: bars with spread; the others as marks."""
    groups = [
        group
        for group in dict.fromkeys(row.group for row in results.rows if row.suite != "masks")
        if results.baseline(group) is not None
    ]
    paths = []
    for number, some in enumerate(_chunks(groups, MOST_BARS)):
        figure = viz.new_figure(9.0, 1.6 + 0.3 * len(some))
        axis = figure.subplots()
        most = 1.0
        for place, group in enumerate(some):
            rows = [row for row in results.rows if row.group == group]
            for row in sorted(rows, key=lambda row: _rank(row.implementation), reverse=True):
                ratio, look = results.ratio(row), _style(row.implementation)
                if ratio is None or row.implementation == results.baseline(group):
                    continue
                if row.implementation != "attnkit":
                    mark = {"linestyle": "", "markersize": 7, "markeredgecolor": "white"}
                    axis.plot(ratio.median, place, label=row.implementation, **(look | mark))
                    most = max(most, ratio.median)
                    continue
                spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
                axis.barh(place, ratio.median - 1, 0.72, left=1.0, color=look["color"], alpha=0.85,
                          label="attnkit")  # fmt: skip
                axis.errorbar(ratio.median, place, xerr=spread, color="black", linewidth=0.9,
                              capsize=2, zorder=4)  # fmt: skip
                most = max(most, ratio.high)
                text = f"{ratio.median:.2f}×"
                edge = max([1.0, ratio.high, *(r.median for r in _ratios(results, rows))])
                axis.annotate(text, (edge, place), xytext=(7, 0), textcoords="offset points",
                              va="center", fontsize=7.5)  # fmt: skip
        axis.axvline(1.0, color="black", linewidth=0.9)
        axis.set_xscale("log", base=2)
        axis.set_xlim(right=1.35 * most)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_yticks(range(len(some)), some, fontsize=7.5)
        axis.set_ylim(len(some) - 0.4, -0.6)
        axis.set_xlabel(
            "times the speed of torch, or of hf:sdpa in Hugging Face models (logarithmic)"
        )
        _tidy(axis, "x")
        _legend(figure, "Speed; whiskers: middle half of the rounds", [axis])
        paths.append(viz.save(figure, _numbered(folder / "speedup.png", number), caption(results)))
    return paths


def features(results: Results, folder: Path) -> list[Path]:
    """Time with a mask or feature, relative to the plain call of the same size."""
    kept = [row for row in results.rows if row.suite == "masks" and row.implementation == "attnkit"]
    panels: dict[str, list[Row]] = {}
    for row in kept:
        size = f"B{row.shape['batch']} H{row.shape['heads']} L{row.shape['queries']} "
        key = f"{row.operation}, {size}D{row.shape['head_dim']} {row.dtype}"
        panels.setdefault(key, []).append(row)
    if not panels:
        return []
    tallest = max(len(rows) for rows in panels.values())
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = viz.new_figure(max(6.4, 4.8 * columns), 1.1 + lines * (0.6 + 0.3 * tallest))
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, rows) in zip(axes.flat, panels.items(), strict=False):
        most = 1.0
        for place, row in enumerate(rows):
            ratio = results.ratio(row, "attnkit-plain")
            if ratio is None:
                continue
            middle, low, high = 1 / ratio.median, 1 / ratio.high, 1 / ratio.low
            axis.barh(place, middle, 0.7, color=viz.BLUE, alpha=0.85)
            spread = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
            axis.errorbar(middle, place, xerr=spread, color="black", linewidth=0.9, capsize=2)
            axis.annotate(f"{middle:.2f}", (high, place), xytext=(6, 0),
                          textcoords="offset points", va="center", fontsize=7.5)  # fmt: skip
            most = max(most, high)
        axis.axvline(1.0, color="black", linewidth=0.9)
        axis.set_xlim(0, 1.15 * most)
        axis.set_yticks(range(len(rows)), [row.mask for row in rows], fontsize=8)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("time, plain call = 1 (shorter is faster)")
        _tidy(axis, "x")
    title = "What masks and features cost; whiskers: middle half of the rounds"
    _legend(figure, title)
    return [viz.save(figure, folder / "features.png", caption(results))]


def accuracy(results: Results, folder: Path) -> list[Path]:
    """Error against float64 beside the speed, a panel for each dtype."""
    kept = [
        row
        for row in results.rows
        if row.suite in (*ATTENTION, "decode") and row.errors and max(row.errors.values()) > 0
    ]
    dtypes = [d for d in ("fp32", "bf16", "fp16", "fp64") if any(r.dtype == d for r in kept)]
    if not dtypes:
        return []
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    figure = viz.new_figure(max(6.4, 4.2 * len(dtypes)), 4.0)
    axes = figure.subplots(1, len(dtypes), squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for row in sorted(kept, key=lambda row: _rank(row.implementation), reverse=True):
            ratio = results.ratio(row)
            if row.dtype == dtype and ratio is not None:
                style = {**_style(row.implementation), "linestyle": "", "alpha": 0.75}
                worst = max(row.errors.values())
                axis.plot(ratio.median, worst, label=row.implementation, **style)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_title(dtype, fontsize=9)
        axis.set_xlabel("times the baseline's speed (right is faster)")
        axis.set_ylabel("largest row error (lower is better)")
        axis.margins(0.12)
        _tidy(axis, "both")
    _legend(figure, "Error against speed, a mark for each row", axes[0])
    return [viz.save(figure, folder / "accuracy.png", caption(results))]


# --- shared --------------------------------------------------------------------------------------


def _style(name: str) -> dict[str, Any]:
    colour, marker = LOOKS.get(name, OTHER)
    over = 3.0 - _rank(name)[0] / 100  # the first in LOOKS lies on top
    return {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6, "zorder": over}


def _rank(name: str) -> tuple[int, str]:
    names = list(LOOKS)
    return (names.index(name) if name in LOOKS else len(names)), name


def _ratios(results: Results, rows: Sequence[Row]) -> list[Any]:
    found = (results.ratio(row) for row in rows)
    return [ratio for ratio in found if ratio is not None]


def _tidy(axis: Axes, grid: Any) -> None:
    axis.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=7.5)
    axis.xaxis.label.set_fontsize(8.5)
    axis.yaxis.label.set_fontsize(8.5)


def _legend(figure: Any, title: str, axes: Iterable[Axes] = ()) -> None:
    """The title and below it one legend for all axes, each name once and in one order."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if not found:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        return
    names = sorted(found, key=_rank)
    figure.legend(
        [found[name] for name in names], names, loc="outside upper left", title=title,
        title_fontsize=12, alignment="left", ncols=min(len(names), int(figure.get_figwidth())),
        frameon=False, fontsize=8, columnspacing=1.2, borderpad=0.1,
    )  # fmt: skip


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The items in as few parts as hold at most ``size`` each, of nearly equal length."""
    count = -(-len(items) // size)
    return [items[i * len(items) // count : (i + 1) * len(items) // count] for i in range(count)]


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_stem(f"{path.stem}-{number + 1}")
