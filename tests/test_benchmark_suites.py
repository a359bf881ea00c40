"""Every suite checks what it times, whoever did it, and knows what it is a share of."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

import attnkit
from attnkit.benchmark import (
    PRESETS,
    SUITES,
    Case,
    Settings,
    Task,
    Workshop,
    WrongResult,
    chosen,
    gpu,
    implementations,
    make_inputs,
    peers,
)
from attnkit.benchmark.cases import structured_mask

SMOKE = PRESETS["smoke"].tasks
SQUARE = Case(1, 4, 33, 16)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def one_wrong_row(results):
    """The last result with its last row off by a third, or another last token."""
    *others, last = (x.clone() for x in results)
    if last.is_floating_point():
        last.flatten(0, -2)[0] *= 1.33
    else:
        last[-1, -1] = (last[-1, -1] + 1) % 8192
    return *others, last


@pytest.mark.parametrize("task", SMOKE, ids=lambda task: task.group)
def test_a_wrong_result_is_seen_and_a_right_one_passes(task):
    contest = SUITES[task.suite].contest(task.case, 0)
    work = contest.prepare("attnkit", task.operation)
    right = work.results()
    assert contest.check("attnkit", task.operation, right)
    with pytest.raises(WrongResult, match="not timed"):
        contest.check("attnkit", task.operation, one_wrong_row(right))
    assert contest.ran("attnkit") in attnkit.available_backends()


def test_the_smoke_preset_has_every_suite_that_needs_no_compiler():
    assert {task.suite for task in SMOKE} == set(SUITES) - {"compile"}


MASKS = [
    *("full", "causal", "padded", "scattered", "window:9", "causal+window:9", "documents:3"),
    *("blocks:0.3", "causal+documents:3+padded", "scattered+window:5"),
]


@pytest.mark.parametrize("mask", MASKS)
def test_the_mask_of_a_case_is_the_same_said_in_two_ways(mask):
    """``Case.visible`` by definition, ``structured_mask`` in attnkit's algebra; and the count."""
    case = Case(3, 2, 130, 8, mask=mask)
    seen = case.visible().expand(3, 1, 130, 130)
    x = torch.randn(3, 1, 130, 8)
    weights = attnkit.attention_weights(x, x, mask=structured_mask(case, make_inputs(case)))
    assert torch.equal(weights > 0, seen)
    if mask != "causal":  # of which the field counts half
        assert case.visible_pairs() == float(seen.sum())


def test_decoding_counts_the_bytes_that_are_read_and_takes_caches_in_turn():
    case = Case(2, 4, 1, 32, "bf16", "int8", 640, 2)
    contest = SUITES["decode"].contest(case, 0)
    ours, theirs = (contest.prepare(name, "decode") for name in ("attnkit", "torch"))
    stored = 2 * 2 * 640 * (32 + 32)
    rest = 2 * 2 * 4 * 32 * 2  # q and out
    assert (ours.bytes, theirs.bytes) == (stored + rest, 2 * stored + rest)
    assert contest.copies > 1


def test_attention_with_everything_is_refused_by_who_lacks_it_with_a_sentence():
    case = replace(SQUARE, mask="causal+softcap+sinks")
    able, reasons = chosen(Task("forward", "forward", case), ())
    assert able == ["attnkit", "naive"]
    assert reasons["torch"] == "it has no sinks and no softcap"
    assert reasons["flex"] == "it has no sinks"
    assert all(reason for reason in reasons.values())
    with pytest.raises(ValueError, match="suite is 'sideways', expected one of forward"):
        chosen(Task("sideways", "forward", case), ())
    with pytest.raises(ValueError, match="operation is 'step', expected one of decode"):
        chosen(Task("decode", "step", case), ())


@pytest.mark.parametrize("name", ["torch:math", "torch:flash", "onnxruntime", "openvino"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_peers_are_right_where_they_are_installed(name, mask):
    case = replace(SQUARE, mask=mask)
    with Workshop(Settings(), memory=False) as workshop:
        reason = workshop.check(Task("forward", "forward", case), name)
    module = {"onnxruntime": "onnx"}.get(name, name)
    absent = name in peers.PEERS and importlib.util.find_spec(module) is None
    assert (reason is not None) == absent
    assert not absent or "not installed" in reason


def test_a_library_that_fails_is_left_out_and_the_rest_is_measured(monkeypatch):
    def broken(case, inputs):
        raise OSError("no such kernel")

    broken_peer = peers.Implementation(broken, lambda case, operation: None, lambda: "1")
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "openvino", broken_peer)
    wanted = ("attnkit", "openvino", "torch")
    settings = Settings(rounds=1, min_time=0.0, implementations=wanted)
    with Workshop(settings, memory=False) as workshop:
        rows = workshop.measure(Task("forward", "forward", SQUARE))
    assert [row.implementation for row in rows] == ["attnkit", "torch"]
    assert workshop.skipped[0]["reason"] == "OSError: no such kernel"


def test_a_gpu_is_timed_by_events_around_a_call_on_a_cold_cache(monkeypatch):
    """The order of what is asked of CUDA; no GPU is needed to see it."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return 2.5

    class Flush:
        def zero_(self):
            log.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: Flush())
    seconds = gpu.Stopwatch("cuda:0")(lambda: log.append("call"))
    assert log == ["flush", "record", "call", "record", "wait"]
    assert seconds == 2.5e-3
