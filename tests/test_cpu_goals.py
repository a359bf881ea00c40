"""bench/cpu_goals.py judges rows by what was promised for a machine like theirs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from attnkit.benchmark import Peak, Results, Row, chosen

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "cpu_goals.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("cpu_goals", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_goals"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cpu_goals"]


def rows(goal, seconds, peak):
    """A row of each implementation with its seconds; ``peak`` in work per second."""
    case, decoding = goal.task.case, goal.task.suite == "decode"
    return Results.here(
        [
            Row(
                goal.task.group, goal.task.operation, name, "cpu", case.shape, case.dtype,
                case.mask, "cpu", (time,) * 6, time, 1, flops=1e9, suite=goal.task.suite,
                peak=Peak("read" if decoding else "fma", peak, peak),
                bytes=1e9 if decoding else None,
            )
            for name, time in seconds.items()
        ],
        {"rounds": 6, "clock": "cpu"},
    )  # fmt: skip


def goal_named(script, group):
    return next(goal for goal in script.goals() if goal.task.group == group)


def test_every_row_is_there_once_and_attnkit_and_torch_can_do_it(script):
    goals = script.goals()
    assert len({goal.task.group for goal in goals}) == len(goals)
    for goal in goals:
        able = chosen(goal.task, ("attnkit", "torch"))[0]
        assert able == ["attnkit", "torch"], goal.task.group


def test_on_a_fast_machine_the_multiple_of_torch_counts(script):
    goal = goal_named(script, "B1 H8 L1024 D64 fp32 full forward")
    assert goal.required == pytest.approx(0.92 * 2.5)
    enough = script.judge(goal, rows(goal, {"attnkit": 1.0, "torch": 2.4}, 1.25e9), fast=True)
    assert (enough.met, enough.cells[-1]) == (True, "met")
    assert enough.cells[4].startswith("2.40")
    assert enough.cells[5] == "80%"
    slow = script.judge(goal, rows(goal, {"attnkit": 1.0, "torch": 2.2}, 1.25e9), fast=True)
    assert (slow.met, slow.cells[-1]) == (False, "MISSED: under 2.30x torch")
    beaten = {"attnkit": 1.0, "torch": 2.4, "onnxruntime": 1.05}
    behind = script.judge(goal, rows(goal, beaten, 1.25e9), fast=True)
    assert (behind.met, behind.cells[-1]) == (False, "MISSED: 1.05x onnxruntime")


def test_elsewhere_the_share_of_the_peak_counts(script):
    goal = goal_named(script, "B1 H8 L1024 D64 fp32 causal forward")
    results = rows(goal, {"attnkit": 1.0, "torch": 1.1}, 1.1e9)
    assert script.judge(goal, results, fast=False).met is True
    results = rows(goal, {"attnkit": 1.0, "torch": 9.0}, 1.25e9)
    verdict = script.judge(goal, results, fast=False)
    assert (verdict.met, verdict.cells[-1]) == (False, "SHORT: 80% of 88%")
    short = goal_named(script, "B8 H12 L197 D64 fp32 full forward")
    verdict = script.judge(short, rows(short, {"attnkit": 1.0, "torch": 0.5}, 1e9), fast=False)
    assert (verdict.met, verdict.cells[-1]) == (None, "no goal for this machine")


def test_a_bf16_row_is_held_to_the_bf16_instructions_where_there_are_some(script):
    goal = goal_named(script, "B1 H8 L1024 D64 bf16 full forward")
    results = rows(goal, {"attnkit": 1.0, "torch": 9.0}, 0.625e9)
    assert script.judge(goal, results, fast=True).cells[5] == "80%"
    assert script.judge(goal, results, fast=False).cells[5] == "160%"


def test_decoding_near_the_read_rate_need_not_beat_a_peer(script):
    goal = next(g for g in script.goals() if "L1x2048 D128 fp32 full" in g.task.group)
    seconds = {"attnkit": 1.0, "torch": 4.0, "onnxruntime": 1.02}
    assert script.judge(goal, rows(goal, seconds, 1.05e9), fast=True).met is True
    assert script.judge(goal, rows(goal, seconds, 2e9), fast=True).met is False


def test_the_table_names_machine_versions_and_counts_what_is_missed(script):
    goal = goal_named(script, "B1 H8 L1024 D64 fp32 full forward")
    results = rows(goal, {"attnkit": 1.0, "torch": 2.2}, 1.25e9)
    text, missed = script.table(script.goals(), results, fast=True)
    assert missed == 1
    assert results.machine.cpu in text
    assert f"1 of {len(script.goals())} rows measured, 1 short of what is required." in text
