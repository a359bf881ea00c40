"""A report of results: one page that needs no network, a Markdown table, and the pictures."""

from __future__ import annotations

import statistics
from pathlib import Path

from attnkit import viz
from attnkit.benchmark import charts
from attnkit.benchmark.command import COLUMNS, skipped
from attnkit.benchmark.machine import headline
from attnkit.benchmark.results import Results, Row, cells, markdown
from attnkit.benchmark.suites import SUITES

TITLES = {
    "speedup": ("Speed beside the baseline", "Bars are attnkit, marks the others; a bar beyond the "
                "line at 1 is faster than the baseline."),
    "throughput": ("Throughput", "Work by formula over the time of the fastest call; the roof is "
                   "what this machine was measured to reach in the same rounds."),
    "memory": ("Memory", "The peak beyond the inputs: output, gradients and workspace."),
    "decode": ("Decoding", "A few queries over a long cache read all of it, and do little else; "
               "caches are taken in turn, so that no processor's cache holds them."),
    "features": ("Masks and features", "The same kernels with and without them. Windows, padding "
                 "and documents take away work, so they may cost less than nothing."),
    "accuracy": ("Error", "Before anything was timed, its numbers were compared with float64: the "
                 "largest error of any row of the output and the gradients, relative to its norm."),
}  # fmt: skip


def write(results: Results, folder: Path) -> list[Path]:
    """Write index.html, results.md and the PNGs into ``folder``; returns their paths.

    Raises:
        viz.MissingExtraError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = charts.draw_all(results, folder)
    table = folder / "results.md"
    table.write_text(text(results, pictures), encoding="utf-8")
    content = {
        "results": results,
        "machine": headline(results.machine, results.versions),
        "peers": ", ".join(f"{name} {v}" for name, v in results.versions.peers.items()),
        "facts": facts(results),
        "pictures": pictures,
        "titles": TITLES,
        "columns": COLUMNS,
        "suites": by_suite(results),
        "skipped": skipped(results),
    }
    page = viz.write_page(folder / "index.html", content, "benchmark/report_page.html.j2")
    return [page, table, *(path for paths in pictures.values() for path in paths)]


def text(results: Results, pictures: dict[str, list[Path]]) -> str:
    """The Markdown: facts, pictures, table."""
    lines = ["# Measurements", "", *(f"- {figure}: {words}" for figure, words in facts(results))]
    for kind, paths in pictures.items():
        title, words = TITLES[kind]
        lines += ["", f"## {title}", "", words, ""]
        lines += [f"![{title}]({path.name})" for path in paths]
    return "\n".join([*lines, "", "## All rows", "", markdown(results)])


def facts(results: Results) -> list[tuple[str, str]]:
    """What to take away, as (figure, words)."""
    found: list[tuple[str, str]] = []
    ours = [row for row in results.rows if row.implementation == "attnkit"]
    for suite, words in (
        ("forward", "of the baseline's speed, forward (median of {} rows)"),
        ("backward", "of its speed, backward (median of {} rows)"),
        ("decode", "of its speed, decoding (median of {} rows)"),
    ):
        ratios = [
            ratio.median
            for row in ours
            if row.suite == suite and (ratio := results.ratio(row)) is not None
        ]
        if ratios:
            found.append((f"{statistics.median(ratios):.2f}×", words.format(len(ratios))))
    shares = [share for row in ours if (share := fp32_share(row)) is not None]
    if shares:
        found.append((f"{max(shares):.0%}", "of the measured multiply-add peak, best fp32 row"))
    found.append((f"{len(results.rows)}", "rows, each right before it was timed"))
    return found


def fp32_share(row: Row) -> float | None:
    """The share of the peak of a row that the fp32 peak bounds."""
    bounded = row.dtype == "fp32" and row.peak is not None and row.peak.unit == "FLOP/s"
    return row.share_of_peak if bounded else None


def by_suite(results: Results) -> list[tuple[str, str, list[tuple[Row, list[str]]]]]:
    """(suite, summary, rows with their cells) in the order in which they were measured."""
    names = dict.fromkeys(row.suite for row in results.rows)
    return [
        (
            name,
            SUITES[name].summary if name in SUITES else "",
            [(row, cells(results, row)) for row in results.rows if row.suite == name],
        )
        for name in names
    ]
