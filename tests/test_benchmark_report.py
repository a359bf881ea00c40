"""The report: a page that needs nothing else, a table, and pictures for what there is data for."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from attnkit.benchmark import PRESETS, SUITES, Case, Peak, Results, Row, charts, chosen, report
from attnkit.cli import main

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


NOISE = {"fp32": 1e-7}
SPEED = {"attnkit": 50e9, "naive": 8e9}  # FLOP/s; the others a little slower than attnkit


def invented(preset: str, *, rounds: int = 5) -> Results:
    """A row for each task of a preset and implementation, with times by formula and noise."""
    draw = random.Random(0)
    rows = []
    for task in PRESETS[preset].tasks:
        suite = SUITES[task.suite]
        names = chosen(task, PRESETS[preset].settings.implementations)[0]
        flops = suite.flops(task.case, task.operation)
        bytes_ = float(task.case.cache_bytes(4)) if suite.roof == "bytes" else None
        kind, top = ("read", 9e9) if suite.roof == "bytes" else ("fma", 64e9)
        for name in names:
            speed = SPEED.get(name, draw.uniform(15e9, 40e9))
            seconds = (bytes_ / (speed / 8) if bytes_ else max(flops, 1e5) / speed) + 5e-6
            times = tuple(seconds * draw.uniform(1.0, 1.3) for _ in range(rounds))
            length = task.case.queries
            extra = length**2 * 4 if name == "naive" else length * 256
            rows.append(
                Row(
                    group=task.group,
                    operation=task.operation,
                    implementation=name,
                    backend="cpu" if name == "attnkit" else name,
                    shape=task.case.shape,
                    dtype=task.case.dtype,
                    mask=task.case.mask,
                    device=task.case.device,
                    seconds=times,
                    best=min(times) * 0.98,
                    batch=1,
                    flops=flops,
                    peak=None if suite.roof == "none" else Peak(kind, top, top * 1.02),
                    errors={"out": draw.uniform(1, 4) * NOISE.get(task.case.dtype, 1e-3)},
                    extra_bytes=extra * task.case.heads if suite.memory else None,
                    memory_method="hwm" if suite.memory else None,
                    extra={"tokens": 64.0} if task.suite == "generation" else {},
                    suite=task.suite,
                    bytes=bytes_,
                )
            )
    skipped = [{"case": "B1", "operation": "step", "implementation": "flex", "reason": "too old"}]
    return Results.here(rows, {"rounds": rounds}, skipped)


@pytest.fixture(scope="module")
def quick():
    return invented("quick")


@pytest.fixture(scope="module")
def folder(quick, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    quick.save(folder / "quick.json")
    assert main(["report", str(folder / "quick.json"), "-o", str(folder / "out")]) == 0
    return folder / "out"


def test_every_picture_is_drawn_where_there_is_data_for_it(folder):
    names = {path.stem for path in folder.glob("*.png")}
    expected = {"speedup", "throughput", "memory", "decode", "features", "accuracy"}
    assert {name.partition("-")[0] for name in names} == expected
    for path in folder.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_page_holds_everything_and_loads_nothing(folder, quick):
    page = (folder / "index.html").read_text()
    assert page.count("<img ") == len(list(folder.glob("*.png")))
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|<script""", page)
    assert quick.machine.cpu in page
    assert quick.created in page
    assert page.count("<tr") == len(quick.rows) + len({row.suite for row in quick.rows})
    assert "flex: too old" in page
    assert 'name="viewport"' in page


def test_the_markdown_names_machine_date_and_every_row(folder, quick):
    text = (folder / "results.md").read_text()
    for path in folder.glob("*.png"):
        assert f"]({path.name})" in text
    assert quick.machine.cpu in text
    assert quick.created in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(quick.rows) + 1


def test_the_slope_of_memory_is_that_of_the_rows(quick):
    rows = [
        row
        for row in quick.rows
        if row.suite == "step" and row.implementation in ("naive", "torch")
    ]
    ((_, panel),) = charts._panels(rows)
    slopes = {
        name: charts.loglog_slope([r.shape["keys"] for r in line], [r.extra_bytes for r in line])
        for name, line in charts._lines(panel)
    }
    assert slopes == {"torch": pytest.approx(1.0), "naive": pytest.approx(2.0)}


def test_a_length_at_two_batch_sizes_is_two_panels(quick):
    row = quick.rows[0]
    some = [
        replace(row, shape=Case(batch, 4, length, 64).shape)
        for batch in (1, 2)
        for length in (128, 256, 512)
    ]
    assert [title.split()[1] for title, _ in charts._panels(some)] == ["B1", "B2"]
    # as in the papers, where the number of tokens is what stays
    constant = [replace(row, shape=Case(512 // n, 4, n, 64).shape) for n in (128, 256, 512)]
    assert [title.split(" H")[0] for title, _ in charts._panels(constant)] == ["forward, B1 to 4"]


def test_results_without_a_baseline_or_lengths_give_a_page_all_the_same(quick, tmp_path):
    ours = [row for row in quick.rows if row.implementation == "attnkit"][:2]
    only = [replace(row, errors={}) for row in ours]
    written = report.write(replace(quick, rows=tuple(only)), tmp_path)
    assert [path.name for path in written] == ["index.html", "results.md"]


def test_every_implementation_has_its_own_look():
    from attnkit.benchmark import IMPLEMENTATIONS, USUAL

    named = {*IMPLEMENTATIONS, *USUAL} - {"attnkit-plain"}
    assert named <= set(charts.LOOKS)
    assert len(set(charts.LOOKS.values())) == len(charts.LOOKS)


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), ("{}", "schema is None")])
def test_other_files_are_refused(content, message, tmp_path, capsys):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit):
        main(["report", str(path)])
    assert message in capsys.readouterr().err


def test_the_invented_results_survive_a_file(quick):
    assert Results.from_json(quick.to_json()) == quick
