"""Pictures of attention, training and speed, and one HTML page that holds everything by itself.

Colours are those of Okabe and Ito and of the map "cividis": told apart whatever one's colour
vision.  Drawing needs matplotlib, the page jinja2; both are imported when they are used.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnkit.benchmark import Results

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
GREY = "#8C8C8C"
IMPLEMENTATION_COLOURS = {"attnkit": BLUE, "torch": ORANGE, "naive": GREY}
IMPLEMENTATION_NAMES = {
    "attnkit": "attnkit",
    "torch": "PyTorch SDPA",
    "naive": "naive (softmax(QKᵀ)V)",
}
DPI = 150
_MORE_FONTS = (  # looked for when the usual font lacks a glyph
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans JP", "Noto Sans SC", "Source Han Sans"),
    *(
        "WenQuanYi Zen Hei",
        "WenQuanYi Micro Hei",
        "IPAexGothic",
        "IPAGothic",
        "Droid Sans Fallback",
    ),
    *("Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
)


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message names the extra that has it."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of ``width`` x ``height`` inches, apart from pyplot and its global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            f"drawing needs matplotlib, which does not import ({error}): "
            "pip install 'attnkit[demo]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path, caption: str = "") -> Path:
    """Write the figure as PNG, with ``caption`` small below it; missing folders are made."""
    if caption:
        figure.supxlabel(caption, fontsize=6.5, color="#555555", x=0.01, ha="left")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # a fixed "Software" entry: the same picture is the same bytes under every matplotlib version
    figure.savefig(path, format="png", metadata={"Software": "attnkit"})
    return path


# --- glyphs ------------------------------------------------------------------------------------


@cache
def _glyphs(font_file: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(font_file).get_charmap())


def fonts_for(text: str) -> list[str] | None:
    """Names of installed fonts that together have every glyph of ``text``; None if there are none.

    Scripts that need shaping (Arabic, Devanagari...) have glyphs here, but matplotlib before 3.11
    joins none of them: leave such text to a browser.
    """
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    usual = "DejaVu Sans"  # comes with matplotlib
    missing = {ord(c) for c in text if not c.isspace()} - _glyphs(
        findfont(FontProperties(family=[usual]))
    )
    fonts = [usual]
    files = {font.name: font.fname for font in fontManager.ttflist}
    for name in _MORE_FONTS:
        if missing and name in files and missing & _glyphs(files[name]):
            fonts.append(name)
            missing -= _glyphs(files[name])
    return None if missing else fonts


# --- attention ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatMap:
    """Weights [L, S] with the token of each row (a query) and of each column (a key)."""

    title: str
    weights: Tensor
    rows: Sequence[str]
    columns: Sequence[str]

    def __post_init__(self) -> None:
        expected = (len(self.rows), len(self.columns))
        if tuple(self.weights.shape) != expected:
            raise ValueError(
                f"weights is {tuple(self.weights.shape)}, expected {expected}: "
                "the numbers of rows and of columns"
            )


def heat_maps(
    maps: Sequence[HeatMap],
    path: str | Path,
    *,
    row_label: str = "query",
    column_label: str = "key",
    title: str = "",
    caption: str = "",
) -> Path:
    """Write ``maps`` side by side, two in a row, as a PNG; darker to brighter is weight 0 to 1."""
    if not maps:
        raise ValueError("maps is empty, expected at least one HeatMap")
    across = min(2, len(maps))
    down = math.ceil(len(maps) / across)
    tall = max(len(m.rows) for m in maps)
    wide = max(len(m.columns) for m in maps)
    figure = new_figure(1.6 + across * (1.1 + 0.3 * wide), 1.0 + down * (1.3 + 0.27 * tall))
    axes = figure.subplots(down, across, squeeze=False).ravel()
    image = None
    for axis, one in zip(axes, maps, strict=False):
        image = axis.imshow(
            one.weights.detach().float().cpu().numpy(),
            cmap="cividis",
            vmin=0.0,
            vmax=1.0,
            aspect="auto",
        )
        _token_axes(axis, one)
        axis.set_ylabel(row_label)
        axis.set_xlabel(column_label)
    for axis in axes[len(maps) :]:
        axis.set_visible(False)
    assert image is not None  # there is at least one map
    figure.colorbar(image, ax=list(axes), label="attention weight", shrink=0.6, aspect=30)
    if title:
        figure.suptitle(title, fontsize=12)
    return save(figure, path, caption)


def _token_axes(axis: Axes, one: HeatMap) -> None:
    text = "".join([one.title, *one.rows, *one.columns])
    fonts = fonts_for(text) or ["DejaVu Sans"]
    axis.set_title(one.title, fontsize=10, fontfamily=fonts)
    axis.set_xticks(
        range(len(one.columns)), one.columns, rotation=60, ha="right", rotation_mode="anchor"
    )
    axis.set_yticks(range(len(one.rows)), one.rows)
    for label in (*axis.get_xticklabels(), *axis.get_yticklabels()):
        label.set_fontfamily(fonts)
        label.set_fontsize(8.5)
    axis.tick_params(length=0)
    # white lines between the cells
    axis.set_xticks([x - 0.5 for x in range(1, len(one.columns))], minor=True)
    axis.set_yticks([y - 0.5 for y in range(1, len(one.rows))], minor=True)
    axis.grid(which="minor", color="white", linewidth=0.4)
    axis.tick_params(which="minor", length=0)
    axis.spines[:].set_visible(False)


def head_grid(
    layers: Sequence[tuple[str, Tensor]],
    path: str | Path,
    *,
    length: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
    title: str = "",
    caption: str = "",
) -> Path:
    """Write a small map of every head of some layers as a PNG: a row per layer, a column per head.

    Args:
        layers: (name, weights [H, R, C]) of each; C and R may be fewer than keys and queries
            (:meth:`attnkit.recording.RecordedAttention.pooled`).
        path: of the PNG.
        length: queries and keys, for the ticks; None: R and C.
        heads: their numbers; None counts from 0.
        title: of the figure.
        caption: small text below.

    Each map has colours of its own, from 0 to the largest weight in it: a head that looks at
    everything alike would be black beside one that looks at one token.
    """
    if not layers:
        raise ValueError("layers is empty, expected at least one")
    across = max(weights.shape[0] for _, weights in layers)
    figure = new_figure(1.2 + 1.35 * across, 0.9 + 1.45 * len(layers))
    axes = figure.subplots(len(layers), across, squeeze=False)
    for index, (name, weights) in enumerate(layers):
        queries, keys = weights.shape[1:] if length is None else length
        for head, axis in enumerate(axes[index]):
            if head >= weights.shape[0]:
                axis.set_visible(False)
                continue
            axis.imshow(
                weights[head].detach().float().cpu().numpy(),
                cmap="cividis",
                vmin=0.0,
                aspect="auto",
                extent=(0, keys, queries, 0),
                interpolation="nearest",
            )
            axis.set_xticks([0, keys])
            axis.set_yticks([0, queries] if head == 0 else [])
            axis.tick_params(length=2, labelsize=6.5)
            if index == 0:
                axis.set_title(f"head {head if heads is None else heads[head]}", fontsize=8)
            if head == 0:
                axis.set_ylabel(name, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    return save(figure, path, caption or "queries downwards, keys to the right")


def head_summary(
    layers: Sequence[tuple[str, Sequence[Tensor]]],
    path: str | Path,
    *,
    title: str = "",
    caption: str = "",
) -> Path:
    """Write entropy, distance and share of the first key of every head as a PNG.

    Args:
        layers: (name, (entropy, distance, first)) of each, [H] each, as a row of
            :meth:`attnkit.recording.RecordedAttention.summary` has them.
        path: of the PNG.
        title: of the figure.
        caption: small text below.
    """
    if not layers:
        raise ValueError("layers is empty, expected at least one")
    panels = (
        ("entropy (nats)", "{:.1f}", None),
        ("distance (positions)", "{:.3g}", None),
        ("weight on the first key (%)", "{:.0f}", 100.0),
    )
    across = max(len(values[0]) for _, values in layers)
    figure = new_figure(1.8 + 3 * (0.9 + 0.42 * across), 1.5 + 0.36 * len(layers))
    for index, (axis, (name, pattern, percent)) in enumerate(
        zip(figure.subplots(1, 3), panels, strict=True)
    ):
        table = [[float(v) * (percent or 1.0) for v in values[index]] for _, values in layers]
        padded = [row + [math.nan] * (across - len(row)) for row in table]
        top = percent or max(max(max(row) for row in table), 1e-9)
        image = axis.imshow(padded, cmap="cividis", vmin=0.0, vmax=top, aspect="auto")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                ink = "black" if value > 0.55 * top else "white"
                axis.text(
                    x, y, pattern.format(value), ha="center", va="center", fontsize=6.5, color=ink
                )
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("head", fontsize=8)
        axis.set_xticks(range(across))
        axis.set_yticks(
            range(len(layers)), [name for name, _ in layers] if index == 0 else [""] * len(layers)
        )
        axis.tick_params(length=0, labelsize=7.5)
        axis.spines[:].set_visible(False)
        figure.colorbar(image, ax=axis, shrink=0.8, aspect=25).ax.tick_params(labelsize=7)
    if title:
        figure.suptitle(title, fontsize=11)
    return save(figure, path, caption)


# --- training ----------------------------------------------------------------------------------


def training_curves(
    losses: Sequence[float],
    learning_rates: Sequence[float],
    exact: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    *,
    floor: float | None = None,
    target: float | None = None,
    validation_losses: Sequence[tuple[int, float]] = (),
    share_label: str = "validation, exact (%)",
    title: str = "",
    caption: str = "",
) -> Path:
    """Write loss, share of exact translations and learning rate over the steps, as a PNG.

    Args:
        losses: of each step, in nats per token.
        learning_rates: of each step.
        exact: by name of a line, (step, share in 0..1) of each validation.
        path: of the PNG.
        floor: the lowest loss that label smoothing allows.
        target: the share to reach.
        validation_losses: (step, loss) of each validation, drawn beside the training loss.
        share_label: what the shares are of, in percent.
        title: of the figure.
        caption: small text below.
    """
    figure = new_figure(7.5, 6.2)
    loss_axis, exact_axis, rate_axis = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2, 1]}
    )
    steps = range(1, len(losses) + 1)
    loss_axis.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.35)
    loss_axis.plot(steps, _smooth(losses), color=BLUE, linewidth=1.8, label="training loss")
    if validation_losses:
        loss_axis.plot(
            [step for step, _ in validation_losses],
            [loss for _, loss in validation_losses],
            color=GREEN,
            marker="o",
            markersize=3.5,
            label="validation",
        )
    loss_axis.set_ylabel("loss (nats per token)")
    loss_axis.set_ylim(bottom=0)
    if floor is not None:
        loss_axis.axhline(floor, color=GREY, linestyle="--", linewidth=1)
        loss_axis.annotate(
            f"lowest possible with label smoothing: {floor:.3f}",
            (0.99, floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=8,
            color="#555555",
        )
    loss_axis.legend(loc="upper right", frameon=False)

    for (name, points), colour, marker in zip(exact.items(), (GREEN, PINK), "os", strict=False):
        where = [step for step, _ in points]
        share = [100 * value for _, value in points]
        exact_axis.plot(where, share, color=colour, marker=marker, markersize=3.5, label=name)
    if target is not None:
        exact_axis.axhline(100 * target, color=GREY, linestyle="--", linewidth=1)
        exact_axis.annotate(
            f"goal {100 * target:g}%",
            (0.01, 100 * target),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color="#555555",
        )
    exact_axis.set_ylim(-3, 106)
    exact_axis.set_ylabel(share_label)
    exact_axis.legend(loc="center left", frameon=False)  # where a run still has nothing right

    rate_axis.plot(steps, [1e3 * rate for rate in learning_rates], color=ORANGE)
    rate_axis.set_ylabel("learning\nrate (10⁻³)")
    rate_axis.set_ylim(bottom=0)
    rate_axis.set_xlabel("step")
    for axis in (loss_axis, exact_axis, rate_axis):
        axis.grid(color="#DDDDDD", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    if title:
        figure.suptitle(title, fontsize=12)
    return save(figure, path, caption)


def _smooth(values: Sequence[float], weight: float = 0.25) -> list[float]:
    """Exponential moving average, free of the bias towards its start."""
    average, total = 0.0, 0.0
    smoothed = []
    for value in values:
        average += weight * (value - average)
        total += weight * (1.0 - total)
        smoothed.append(average / total)
    return smoothed


def confusion_matrix(
    counts: Sequence[Sequence[int]], names: Sequence[str], path: str | Path, *, title: str = ""
) -> Path:
    """Write how often class i (a row) was taken for class j (a column), as a PNG.

    Colours are shares of a row, so that rare classes show; the numbers are counts.
    """
    if len(counts) != len(names) or any(len(row) != len(names) for row in counts):
        raise ValueError(f"counts is not square, of {len(names)} classes as names has them")
    size = 2.5 + 0.34 * len(names)
    figure = new_figure(size, size)
    axis = figure.subplots()
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    axis.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count:
                dark = "white" if shares[i][j] > 0.5 else "black"
                axis.text(j, i, str(count), ha="center", va="center", fontsize=7, color=dark)
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("found")
    axis.set_ylabel("true")
    if title:
        figure.suptitle(title, fontsize=12)
    return save(figure, path)


# --- speed -------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    """A time in milliseconds with three digits, or more where it is long: 0.0123, 45.6, 1110."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def speed_bars(
    results: Results,
    path: str | Path,
    *,
    baseline: str = "torch",
    title: str = "",
    caption: str = "",
) -> Path:
    """Write speed beside ``baseline``'s (bars) and peak memory (dots) of each group, as a PNG.

    A bar is the median of the paired rounds' ratios, its whisker their middle half, and the number
    behind it the median time of a call.
    """
    groups = list(dict.fromkeys(row.group for row in results.rows))
    names = [n for n in IMPLEMENTATION_NAMES if any(r.implementation == n for r in results.rows)]
    figure = new_figure(10.5, 1.3 + 0.62 * len(groups))
    speed_axis, memory_axis = figure.subplots(1, 2, sharey=True)
    height = 0.8 / max(1, len(names))
    longest = 1.0
    for position, name in enumerate(names):
        look = {"color": IMPLEMENTATION_COLOURS[name], "label": IMPLEMENTATION_NAMES[name]}
        rows = [row for row in results.rows if row.implementation == name]
        places = [
            groups.index(row.group) + (position - (len(names) - 1) / 2) * height for row in rows
        ]
        ratios = [results.ratio(row, baseline) for row in rows]
        for place, row, ratio in zip(places, rows, ratios, strict=True):
            if ratio is None:
                continue
            spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            longest = max(longest, ratio.high)
            speed_axis.barh(place, ratio.median, 0.92 * height, color=look["color"])
            speed_axis.errorbar(ratio.median, place, xerr=spread, color="black", linewidth=0.8)
            text = f"{ratio.median:.2f}×  {milliseconds(row.samples.median)} ms"
            speed_axis.annotate(
                text,
                (max(1.0, ratio.high), place),  # clear of the line at 1
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
        memory = [None if row.extra_bytes is None else row.extra_bytes / 2**20 for row in rows]
        known = [(m, p) for m, p in zip(memory, places, strict=True) if m]  # 0 has no logarithm
        memory_axis.scatter([m for m, _ in known], [p for _, p in known], s=26, zorder=3, **look)
        for amount, place in known:
            memory_axis.annotate(
                f"{amount:.3g}",
                (amount, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
        if known:
            memory_axis.set_xscale("log")
            memory_axis.margins(x=0.15)
    speed_axis.axvline(1.0, color="#444444", linewidth=0.8)
    speed_axis.set_xlim(0, 1.35 * longest)
    speed_axis.set_yticks(range(len(groups)), groups)
    speed_axis.invert_yaxis()
    base = IMPLEMENTATION_NAMES.get(baseline, baseline)
    speed_axis.set_xlabel(f"speed, {base} = 1 (longer is faster)")
    memory_axis.set_xlabel("peak memory beyond the inputs (MiB, logarithmic)")
    for axis in (speed_axis, memory_axis):
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
    for place in range(1, len(groups)):
        memory_axis.axhline(place - 0.5, color="#DDDDDD", linewidth=0.6)
    handles, labels = memory_axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(names), frameon=False)
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return save(figure, path, caption)


# --- the page ----------------------------------------------------------------------------------


def embedded(path: str | Path) -> str:
    """A PNG file as a ``data:`` address, so that a page needs no other file."""
    return "data:image/png;base64," + base64.b64encode(Path(path).read_bytes()).decode("ascii")


def cell_style(weight: float) -> str:
    """CSS of a table cell whose darkness shows an attention weight in 0..1."""
    # from white to the blue of the bars; white letters would be needed on neither
    share = min(max(weight, 0.0), 1.0)
    colour = [round(255 + share * (part - 255)) for part in (64, 140, 205)]
    return "background:rgb({},{},{})".format(*colour)


def write_page(
    path: str | Path, content: Mapping[str, Any], template: str = "demo_page.html.j2"
) -> Path:
    """Write a page from ``content``, as the template of the package asks; text is escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    package = resources.files("attnkit")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["embedded"] = embedded
    environment.filters["cell_style"] = cell_style
    environment.globals["css"] = Markup(package.joinpath("page.css").read_text("utf-8"))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = environment.from_string(package.joinpath(template).read_text("utf-8")).render(content)
    path.write_text(text, encoding="utf-8")
    return path
