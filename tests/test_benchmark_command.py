"""``attnkit bench``: one's own shapes, and two result files compared."""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import replace

import pytest
import torch

from attnkit.benchmark import Case, Results, Row, Task, command, regressions
from attnkit.cli import main


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(group, implementation, seconds):
    case = Case(1, 2, 65, 16)
    return Row(
        group, "forward", implementation, "cpu", case.shape, "fp32", "full", "cpu", tuple(seconds),
        min(seconds), 1, 1e9, suite="forward",
    )  # fmt: skip


def simulated(seed, groups, rounds=15, slower=1.0, drift=1.0):
    """Rows as a busy machine gives them.

    All of a round is up to half as fast again as the next; each time scatters by 3% besides, one in
    ten is interrupted and takes up to three times as long, and a process differs from the next by
    1.5% in how its memory lies.
    """
    draw = random.Random(seed)
    rows = []
    for group in range(groups):
        machine = [math.exp(draw.gauss(0, 0.25)) * drift for _ in range(rounds)]
        for name, base in (("attnkit", 1.0 * slower), ("torch", 2.0), ("naive", 5.0)):
            lies = math.exp(draw.gauss(0, 0.015))
            seconds = []
            for common in machine:
                interrupted = draw.uniform(1.2, 3.0) if draw.random() < 0.1 else 1.0
                seconds.append(base * common * lies * math.exp(draw.gauss(0, 0.03)) * interrupted)
            rows.append(row(f"case {group}", name, seconds))
    return Results.here(rows, {})


def test_at_most_one_in_twenty_is_flagged_where_nothing_changed():
    found = regressions.changes(simulated(1, 300), simulated(2, 300, drift=3.0))
    assert len(found) == 300
    flagged = [change for change in found if change.verdict in ("slower", "faster")]
    assert len(flagged) <= 0.05 * len(found)


def test_a_slowdown_of_a_fifth_is_caught_nineteen_times_in_twenty():
    old, new = simulated(3, 300), simulated(4, 300, slower=1.2, drift=0.5)
    found = regressions.changes(old, new)
    assert sum(change.verdict == "slower" for change in found) >= 0.95 * len(found)
    backwards = regressions.changes(new, old)
    assert sum(change.verdict == "faster" for change in backwards) >= 0.95 * len(found)


def test_a_noisy_row_is_called_noisy_and_not_slower():
    draw = random.Random(0)

    def wild():
        return Results.here(
            [
                row("case", "attnkit", [math.exp(draw.gauss(0, 0.5)) for _ in range(7)]),
                row("case", "torch", [1.0] * 7),
            ],
            {},
        )

    verdicts = [regressions.changes(wild(), wild())[0].verdict for _ in range(50)]
    assert verdicts.count("too noisy") >= 40


def test_without_a_yardstick_seconds_are_compared_and_it_is_said():
    old, new = (Results.here([row("case", "attnkit", [t] * 5)], {}) for t in (1.0, 1.5))
    (change,) = regressions.changes(old, new)
    assert (change.verdict, change.yardstick) == ("slower", ())
    assert "beside nothing: seconds as they are" in regressions.report(old, new)[0]


def test_the_command_compares_files_and_its_status_is_for_ci(tmp_path, capsys):
    same, slow, other = (tmp_path / f"{name}.json" for name in ("same", "slow", "other"))
    simulated(5, 3).save(same)
    slower = simulated(6, 3, slower=1.5)
    slower.save(slow)
    renamed = [replace(one, group=f"other {one.group}") for one in slower.rows]
    replace(slower, rows=tuple(renamed)).save(other)
    assert main(["bench", "--compare", str(same), str(same)]) == 0
    assert "3 same" in capsys.readouterr().out
    assert main(["bench", "--compare", str(same), str(slow)]) == 1
    assert "!! case 0  attnkit: 1." in capsys.readouterr().out
    assert main(["bench", "--compare", str(same), str(other)]) == 2
    out = capsys.readouterr().out
    assert "no row of attnkit is in both files" in out
    assert "other case 0, attnkit: only in the new file" in out


def options(*flags):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(flags)


def test_a_shape_of_ones_own_becomes_tasks():
    chosen = command.chosen_preset(
        options(
            *("--shape", "8,32,4096,128", "1,4,64,16", "--dtype", "bf16", "--causal"),
            *("--window", "1024", "--features", "softcap", "--operations", "step"),
            *("--kv-heads", "2", "--implementations", "attnkit", "torch", "--rounds", "3"),
        )
    )
    mask = "causal+window:1024+softcap"
    assert chosen.tasks == tuple(
        Task("step", "step", Case(*size, "bf16", mask, kv_heads=2))
        for size in ((8, 32, 4096, 128), (1, 4, 64, 16))
    )
    assert chosen.settings.implementations == ("attnkit", "torch")
    assert chosen.settings.rounds == 3
    everyone = command.chosen_preset(options("--suites", "decode", "--implementations", "all"))
    assert {task.suite for task in everyone.tasks} == {"decode"}
    assert everyone.settings.implementations == ()


def test_the_command_measures_prints_a_table_and_writes_it(tmp_path, capsys):
    path = tmp_path / "own.json"
    flags = ["--shape", "1,2,33,16", "--padding", "--rounds", "2", "--no-memory", "--threads", "1"]
    assert main(["bench", *flags, "--operations", "forward", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "B1 H2 L33 D16 fp32 padded  forward" in out
    assert "left out: torch:folded: there are no grouped heads to fold" in out
    assert "B1 H2 L33 D16 fp32 padded forward" in err  # the progress, a line each without terminal
    names = [row.implementation for row in Results.load(path).rows]
    assert names == ["attnkit", "torch", "naive"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shape", "1,2,3"], r"'1,2,3', expected four sizes B,H,L,D"),
        (["--shape", "1,2,0,4"], "expected four sizes B,H,L,D of at least 1"),
        (["--shape", "1,2,3,4", "--kv-heads", "3"], "heads is 2, expected a multiple of kv_heads"),
        (["--shape", "1,2,3,4", "--window", "0"], "expected a number above 0 after window:"),
        (["--shape", "1,2,3,4", "--preset", "cpu"], "--shape: not allowed with --preset"),
        (["--implementations", "flash"], "implementation is 'flash', expected one of"),
        (["--rounds", "0"], "argument --rounds: 0, expected at least 1"),
        (["--device", "cuda:99"], "argument --device"),
        (["--compare", "a.json", "b.json"], r"a\.json: No such file"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_measured(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *flags])
    assert stop.value.code == 2
    import re

    assert re.search(message, capsys.readouterr().err)
