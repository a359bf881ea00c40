"""The measuring engine: it interleaves, checks before it times, and writes what it can read."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnkit
from attnkit import benchmark as engine
from attnkit.benchmark import (
    Candidate,
    Case,
    MemoryMeter,
    Peak,
    Preset,
    Probe,
    Results,
    Samples,
    Settings,
    Subject,
    Task,
    Workshop,
    WrongResult,
    compare,
    implementations,
    loglog_slope,
    machine,
    measuring,
    numeric,
    paired_ratio,
    peak_growth,
    probes,
)

ROOT = Path(__file__).resolve().parent.parent
TINY = Case(1, 2, 65, 16)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small tensors only; threads that wait for each other would be most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Clock:
    """Time passes only when a candidate says so."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def candidate(self, name, seconds):
        times = iter(seconds) if isinstance(seconds, list) else None

        def call():
            self.log.append(name)
            self.now += next(times) if times else seconds

        return Candidate(name, call)


def timed(clock, *candidates, **options):
    return compare(candidates, **{"pause": 0.0, "clock": clock, "min_time": 0.01, **options})


# ---- timing ----


def test_every_round_times_every_candidate_once_in_an_order_drawn_anew():
    clock = Clock()
    names = ["a", "b", "c"]
    found = timed(clock, *(clock.candidate(n, 1.0) for n in names), rounds=8)
    assert all(sorted(order) == names for order in found.orders)
    assert len(set(found.orders)) > 1
    # after the warm-up of each, the calls follow the orders: nobody's rounds are taken together
    assert clock.log[-24:] == [name for order in found.orders for name in order]
    assert all(len(found.samples[n].seconds) == 8 for n in names)


def test_the_seed_gives_the_order():
    def orders(seed):
        clock = Clock()
        candidates = [clock.candidate(n, 1.0) for n in "abcd"]
        return timed(clock, *candidates, rounds=5, seed=seed).orders

    assert orders(3) == orders(3)
    assert orders(3) != orders(4)


def test_a_long_call_is_timed_alone_and_a_short_one_in_a_batch():
    clock = Clock()
    found = timed(clock, clock.candidate("long", 0.125), clock.candidate("short", 2.0**-20))
    assert found.samples["long"].batch == 1
    assert found.samples["short"].batch == 64  # of about a microsecond: the first power past 50
    assert found.samples["long"].median == found.samples["long"].best == 0.125
    assert found.samples["short"].median == pytest.approx(2.0**-20)


def test_a_round_lasts_min_time():
    clock = Clock()
    timed(clock, clock.candidate("a", 0.001), rounds=1, min_time=0.0995)
    # the warm-up, one call to find the batch's size, one to warm the caches, 100 to fill the time
    assert len(clock.log) == 2 + 1 + 100


def test_a_sample_is_the_median_of_its_round_and_best_the_fastest_call():
    clock = Clock()
    warm_up, first, second = (1.0, 1.0), (0.5, 3.0, 1.0, 2.0), (0.5, 5.0, 4.0)
    seconds = [*warm_up, *first, *second]
    found = timed(clock, clock.candidate("a", seconds), rounds=2, min_time=5.5)
    assert found.samples["a"].seconds == (2.0, 4.5)
    assert found.samples["a"].best == 1.0


def test_waiting_for_queued_work_is_part_of_the_time():
    clock = Clock()
    queued = clock.candidate("a", 1.0)

    def finish():
        clock.now += 2.0

    found = timed(clock, replace(queued, finish=finish), rounds=2)
    assert found.samples["a"].seconds == (3.0, 3.0)


def test_the_garbage_collector_is_off_while_timing_and_on_again_after_a_failure():
    clock, seen = Clock(), []

    def call():
        seen.append(gc.isenabled())
        clock.now += 1.0
        if len(seen) > 4:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        timed(clock, Candidate("a", call), rounds=100)
    assert seen == [True, True, False, False, False]  # two calls to warm up
    assert gc.isenabled()


def test_a_ratio_is_taken_inside_a_round():
    """The machine becomes four times slower half-way; what one is to the other does not change."""
    ours = Samples((1.0, 2.0, 4.0), best=1.0, batch=1)
    theirs = Samples((3.0, 6.0, 12.0), best=3.0, batch=1)
    ratio = paired_ratio(ours, theirs)
    assert (ratio.low, ratio.median, ratio.high, ratio.best) == (3.0, 3.0, 3.0, 3.0)
    spread = paired_ratio(Samples((1.0,) * 5, 1.0, 1), Samples((1.0, 2.0, 3.0, 4.0, 5.0), 1.0, 1))
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)


def test_the_interval_of_a_ratio_is_that_of_its_order_statistics():
    """The ranks are those of the tables of the sign test, for 95% unless another is given."""
    expected = {(6, 0.95): 1, (8, 0.95): 1, (9, 0.95): 2, (20, 0.95): 6, (20, 0.99): 4, (5, 0.9): 1}
    for (n, confidence), k in expected.items():
        seconds = tuple(float(x) for x in random.Random(n).sample(range(1, n + 1), n))
        ratio = paired_ratio(Samples((1.0,) * n, 1.0, 1), Samples(seconds, 1.0, 1))
        assert ratio.rounds == tuple(range(1, n + 1))
        assert ratio.interval(confidence) == (k, n + 1 - k)
    ratio = paired_ratio(Samples((1.0,) * 5, 1.0, 1), Samples((1.0,) * 5, 1.0, 1))
    with pytest.raises(ValueError, match=r"confidence is 0.95, expected less with 5 rounds"):
        ratio.interval()
    with pytest.raises(
        ValueError, match=r"confidence is 1.0, expected more than 0 and less than 1"
    ):
        ratio.interval(1.0)


def test_samples_of_different_comparisons_are_not_paired():
    with pytest.raises(ValueError, match="ours has 1 rounds, baseline has 2"):
        paired_ratio(Samples((1.0,), 1.0, 1), Samples((1.0, 1.0), 1.0, 1))


@pytest.mark.parametrize(
    ("names", "rounds", "message"),
    [("", 1, "candidates is empty"), ("aa", 1, "each name once"), ("ab", 0, "rounds is 0")],
)
def test_wrong_comparisons_are_refused(names, rounds, message):
    with pytest.raises(ValueError, match=message):
        compare([Candidate(n, int) for n in names], rounds=rounds)


# ---- cases ----


def test_work_follows_the_formula_of_the_field():
    case = Case(2, 8, 1024, 64)
    forward = 4.0 * 2 * 8 * 1024 * 1024 * 64
    assert case.flops("forward") == forward
    assert case.flops("backward") == 2.5 * forward
    assert case.flops("step") == 3.5 * forward
    assert replace(case, mask="causal").flops("forward") == forward / 2
    assert replace(case, value_dim=32).flops("forward") == forward * 3 / 4
    padded = replace(case, batch=4, mask="padded")
    assert padded.lengths() == [256, 512, 768, 1024]
    assert padded.flops("forward") == 2 * forward * (0.25 + 0.5 + 0.75 + 1) / 4
    few = Case(1, 1, 3, 8, keys=10, mask="causal")
    assert few.visible_pairs() == 1 + 2 + 3


def test_a_case_knows_the_bytes_of_its_tensors():
    case = Case(1, 8, 100, 64, dtype="bf16", keys=200, kv_heads=2, value_dim=32)
    inputs = engine.make_inputs(case)
    out = implementations.torch_sdpa(case, inputs)(*inputs[:3])
    assert case.tensor_bytes() == sum(x.nbytes for x in (*inputs[:3], out))
    assert case.label == "B1 H8/2 L100x200 D64/32 bf16 full"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', expected one of fp64, fp32"),
        (
            {"mask": "windows"},
            r"mask is 'windows', expected terms of full, .*each once",
        ),
        ({"mask": "causal+causal"}, "expected terms of"),
        ({"mask": "causal:3"}, "expected terms of"),
        ({"mask": "window:x"}, "mask is 'window:x', expected a number after window:"),
        ({"mask": "softcap:0"}, "mask is 'softcap:0', expected a number above 0 after softcap:"),
        ({"mask": "learned-bias", "batch": 2}, "batch is 2, expected 1 with a learned-bias"),
        ({"kv_heads": 3}, "heads is 2, expected a multiple of kv_heads, 3"),
        ({"queries": 0}, "queries is 0, expected at least 1"),
    ],
)
def test_wrong_cases_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_inputs_depend_on_the_seed_only():
    a, b, c = (engine.make_inputs(TINY, seed) for seed in (1, 1, 2))
    assert torch.equal(a.q, b.q)
    assert not torch.equal(a.q, c.q)


@pytest.mark.parametrize("name", ["flash", "torch:cpu", "naive:reference"])
def test_unknown_implementations_are_refused(name):
    with pytest.raises(ValueError, match=r"expected one of attnkit, torch, naive, .*<backend>"):
        engine.implementation(name, TINY, engine.make_inputs(TINY))
    with pytest.raises(ValueError, match=f"implementation is '{name}', expected one of"):
        engine.chosen(Task("forward", "forward", TINY), [name])


def test_the_backend_that_runs_is_known():
    inputs = engine.make_inputs(TINY)
    assert implementations.ran("torch", TINY, inputs) == "torch"
    assert implementations.ran("attnkit:reference", TINY, inputs) == "reference"
    with attnkit.use_backend("reference"):
        assert implementations.ran("attnkit", TINY, inputs) == "reference"


# ---- numbers before speed ----

EVERYWHERE = [
    Case(2, 4, 33, 16, dtype=dtype, mask=mask, kv_heads=2, value_dim=8)
    for dtype in ("fp64", "fp32", "bf16", "fp16")
    for mask in ("full", "causal", "padded", "causal+window:5", "documents:3", "scattered+causal")
]


@pytest.mark.parametrize("case", EVERYWHERE, ids=lambda case: case.label)
def test_right_implementations_pass(case):
    subject = Subject.of(case)
    for name in ("attnkit:reference", "torch", "naive"):
        found = subject.check(name, "step", subject.prepare(name, "step").results())
        assert list(found) == ["out", "dq", "dk", "dv"]
        # not compared with itself; the reference in float64 is the truth
        assert case.dtype == "fp64" or all(error > 0 for error in found.values())


def one_key_more(case, inputs):
    """Causal, but row 16 sees key 17 too."""
    attend = implementations.naive(case, inputs)
    full = implementations.naive(replace(case, mask="full"), inputs)

    def wrong(q, k, v):
        right = attend(q, k, v)
        row = full(q[:, :, 16:17], k[:, :, :18], v[:, :, :18])
        return torch.cat([right[:, :, :16], row, right[:, :, 17:]], 2)

    return wrong


def not_a_number(case, inputs):
    attend = implementations.naive(case, inputs)

    def wrong(q, k, v):
        out = attend(q, k, v).clone()
        out[0, 0, 0, 0] = float("nan")
        return out

    return wrong


def wrong_gradient(case, inputs):
    attend = implementations.naive(case, inputs)
    # the same values, but half of the gradient for v
    return lambda q, k, v: attend(q, k, v / 2 + v.detach() / 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("wrong", "operation", "tensor"),
    [
        (one_key_more, "forward", "out"),
        (not_a_number, "forward", "out"),
        (wrong_gradient, "backward", "dv"),
        (wrong_gradient, "step", "dv"),
    ],
)
def test_a_wrong_implementation_is_not_timed(monkeypatch, dtype, wrong, operation, tensor):
    replaced = implementations.IMPLEMENTATIONS["torch"]._replace(make=wrong)
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "torch", replaced)
    monkeypatch.setattr(measuring, "compare", lambda *_, **__: pytest.fail("it was timed"))
    case = replace(TINY, dtype=dtype, mask="causal")
    with (
        Workshop(Settings(implementations=("naive", "torch"))) as workshop,
        pytest.raises(WrongResult, match=rf"torch {operation} on B1 H2 L65.*: {tensor} has a row"),
    ):
        workshop.measure(Task(operation, operation, case))


def test_a_large_case_is_checked_on_some_heads_with_the_first_and_the_last():
    case = Case(2, 6, 8, 4, kv_heads=3)
    whole = engine.truth(case, engine.make_inputs(case))
    some = engine.truth(case, engine.make_inputs(case), budget=1.0)
    assert whole.pairs == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert some.pairs == ((0, 0), (1, 2))
    assert torch.equal(some.tensors[1][0], whole.tensors[5][0])
    single = Case(1, 2, 8, 4, kv_heads=1)
    assert engine.truth(single, engine.make_inputs(single), budget=1.0).pairs == ((0, 0),)


def test_a_row_error_sees_one_bad_row_and_forgives_a_zero_row():
    expected = torch.ones(100, 4)
    expected[0] = 0.0  # as the first row of dq under a causal mask
    found = expected.clone()
    found[0] += 1e-6
    assert numeric.row_error(found, expected) < 2e-6
    found[50] *= 1.5
    assert numeric.row_error(found, expected) == pytest.approx(0.5)
    found[7, 1] = float("nan")
    assert numeric.row_error(found, expected) != numeric.row_error(found, expected)


def test_a_nan_in_an_earlier_head_is_not_forgotten():
    inputs = engine.make_inputs(TINY)
    true = engine.truth(TINY, inputs)
    for head in (0, 1):
        out = implementations.naive(TINY, inputs)(*inputs[:3]).clone()
        out[0, head, 3] = float("nan")
        with pytest.raises(WrongResult, match="nan"):
            engine.check("x", (out,), true, 1e9)


# ---- memory ----


def test_the_peak_counts_what_is_freed_before_the_end():
    size = 96 << 20  # more than malloc ever keeps for itself
    growth, method = peak_growth(lambda: torch.ones(size // 4).sum())
    assert growth > 0.9 * size
    if method == "hwm":
        assert growth < 1.2 * size
        assert peak_growth(lambda: torch.ones(size // 8).sum())[0] < 0.7 * size


def test_memory_in_a_child_tells_linear_from_quadratic():
    case = Case(1, 4, 1024, 32)
    scores = 4 * 1024 * 1024 * 4
    with MemoryMeter(threads=1) as meter:
        step = Task("step", "step", case)
        naive = meter.measure("naive", step)
        fused = meter.measure("torch", step)
        # a failure there is an error here, and the helper goes on
        with pytest.raises(RuntimeError, match=r"cuda, B1 .* ValueError: implementation is"):
            meter.measure("cuda", step)
        again = meter.measure("torch", step)
    assert naive.tensor_bytes == case.tensor_bytes() == 4 * 1024 * 4 * 32 * 4
    assert naive.extra > 2 * scores
    if fused.method == "hwm":
        assert fused.tensor_bytes < fused.extra < scores  # three gradients and the output at least
        assert abs(again.extra - fused.extra) < 0.25 * fused.extra
        assert fused.ratio == fused.extra / fused.tensor_bytes
    with pytest.raises(RuntimeError, match="MemoryMeter is closed"):
        meter.measure("torch", step)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_slope_is_the_exponent(power):
    sizes = [2048, 4096, 8192, 16384]
    assert loglog_slope(sizes, [7.0 * n**power for n in sizes]) == pytest.approx(power)
    noisy = [n**power * f for n, f in zip(sizes, (1.02, 0.98, 1.02, 0.98), strict=True)]
    assert loglog_slope(sizes, noisy) == pytest.approx(power, abs=0.05)


def test_a_slope_needs_two_points():
    with pytest.raises(ValueError, match="sizes has 1 numbers, values 1; expected two or more"):
        loglog_slope([1.0], [1.0])


# ---- probes ----


def test_probes_know_their_work(monkeypatch):
    flops, read = engine.flops_probe(flops=1e6), engine.read_probe(size=1 << 20)
    assert flops.kind in ("fma", "matmul")
    assert read.kind in ("read", "sum")
    assert read.work == 1 << 20
    for probe in (flops, read):
        assert probe.work > 0
        probe.call()

    monkeypatch.setattr(probes, "_operator", lambda name: None)
    plain = engine.flops_probe()
    assert (plain.kind, plain.work) == ("matmul", 2.0 * probes.FALLBACK_SIZE**3)
    assert engine.read_probe(size=1 << 20).kind == "sum"

    monkeypatch.setattr(probes, "_operator", lambda name: lambda iterations: iterations * 64)
    probe = engine.flops_probe(flops=6400.0)
    assert (probe.kind, probe.work, probe.call()) == ("fma", 6400.0, 6400)


def test_a_peak_is_work_over_time():
    peak = Peak.of(Probe("fma", 100.0, int), Samples((2.0, 4.0, 5.0), best=1.0, batch=1))
    assert peak == Peak("fma", median=25.0, best=100.0)


# ---- results ----


@pytest.fixture(scope="module")
def results():
    settings = Settings(rounds=3, min_time=0.0, implementations=("attnkit:reference", "torch"))
    lines = []
    before = torch.get_num_threads()
    found = engine.run(
        Preset.of((TINY,), settings=settings), memory=False, threads=1, progress=lines.append
    )
    assert lines == [f"{TINY.label} forward", f"{TINY.label} backward"]
    assert torch.get_num_threads() == before
    return found


def test_a_row_says_all_that_is_needed_to_read_it(results):
    assert len(results.rows) == 4
    row = results.rows[0]
    assert (row.operation, row.implementation) == ("forward", "attnkit:reference")
    assert (row.backend, row.dtype, row.mask, row.device) == ("reference", "fp32", "full", "cpu")
    assert row.shape == TINY.shape
    assert len(row.seconds) == 3
    assert row.best <= min(row.seconds)
    assert row.gflops == row.flops / row.best / 1e9
    assert row.peak is not None
    assert row.share_of_peak == row.flops / row.best / row.peak.best
    assert set(row.errors) == {"out"}
    assert set(results.rows[3].errors) == {"out", "dq", "dk", "dv"}
    assert results.machine.threads >= 1
    assert results.settings["rounds"] == 3


def test_results_survive_the_file(results, tmp_path):
    path = tmp_path / "deep" / "results.json"
    results.save(path)
    assert Results.load(path) == results
    data = json.loads(path.read_text())
    assert (data["schema"], data["version"]) == ("attnkit.benchmark", 2)
    # what follows from the samples stands there too, for readers without this package
    assert data["rows"][0]["median"] == results.rows[0].samples.median
    assert data["rows"][0]["gflops"] == results.rows[0].gflops


def test_a_reader_ignores_fields_that_came_later(results):
    data = json.loads(results.to_json())
    data["weather"] = "fine"
    data["machine"]["fans"] = 3
    data["rows"][0]["watts"] = 17.0
    data["rows"][0]["peak"]["volts"] = 1.0
    assert Results.from_json(json.dumps(data)) == results


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other"}, "schema is 'other', expected 'attnkit.benchmark'"),
        ({"version": 3}, "version is 3, expected 1 or 2"),
        (None, "schema is 'list'"),
    ],
)
def test_other_files_are_refused(results, change, message):
    data = json.loads(results.to_json())
    text = json.dumps([] if change is None else data | change)
    with pytest.raises(ValueError, match=message):
        Results.from_json(text)


def test_the_table_shows_the_ratio_and_what_was_skipped(results):
    reason = {"case": "B1", "operation": "step", "implementation": "naive", "reason": "too large"}
    ours = replace(results.rows[0], seconds=(1.0, 1.0, 1.0), best=1.0, flops=5e9)
    theirs = replace(results.rows[1], seconds=(2.0, 2.5, 3.0), best=2.0)
    ours = replace(ours, peak=Peak("fma", 1e10, 1e10), extra_bytes=3 << 20, errors={"out": 1e-7})
    table = engine.markdown(replace(results, rows=(ours, theirs), skipped=(reason,)))
    line = next(line for line in table.splitlines() if "attnkit:reference" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        TINY.label,
        "forward",
        "attnkit:reference",
        *("1e+03", "1e+03", "5", "50%", "2.50 (2.25 to 2.75)", "3.0", "1.0e-07"),
    ]
    assert "Skipped: B1 step naive: too large." in table


def test_naive_is_left_out_where_its_scores_do_not_fit():
    large = Task("forward", "forward", Case(8, 32, 1 << 17, 64))
    names, reasons = engine.chosen(large, ("attnkit", "torch", "naive"))
    assert names == ["attnkit", "torch"]
    assert "GiB" in reasons["naive"]
    assert engine.chosen(Task("forward", "forward", TINY), ("naive",)) == (["naive"], {})


@pytest.mark.parametrize("name", sorted(engine.PRESETS))
def test_presets_have_no_task_twice_and_attnkit_can_do_each(name):
    tasks = engine.PRESETS[name].tasks
    assert len({task.group for task in tasks}) == len(tasks) > 0
    for task in tasks:
        assert "attnkit" in engine.chosen(task, engine.PRESETS[name].settings.implementations)[0]


def test_a_file_of_version_1_is_read(results):
    data = json.loads(results.to_json())
    data["version"] = 1
    for row in data["rows"]:
        del row["suite"], row["bytes"], row["gigabytes"]
    assert Results.from_json(json.dumps(data)) == results


# ---- machine ----


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_the_commit_is_that_of_the_checkout_which_holds_the_package(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "spec.py").write_text("a = 1\n")
    assert machine.git_commit(package) is None  # no repository
    git(tmp_path, "init", "-q")
    assert machine.git_commit(package) is None  # a repository that does not hold it
    git(tmp_path, "add", "pkg/spec.py")
    git(tmp_path, "commit", "-q", "-m", "x")
    commit = machine.git_commit(package)
    assert commit is not None
    assert len(commit) == 40
    (package / "spec.py").write_text("a = 2\n")
    assert machine.git_commit(package) == commit + "+changes"


def test_the_machine_is_described():
    found = engine.describe_machine()
    assert found.cpu
    assert found.cores >= 1
    assert found.threads == torch.get_num_threads()
    assert found.instruction_set == torch.backends.cpu.get_cpu_capability()
    assert set(found.flags) <= set(machine.TELLING_FLAGS)
    assert found.memory_bytes > 1 << 28
    assert engine.describe_versions().torch == torch.__version__


# ---- bench/ ----


def test_the_suites_hand_their_interleaved_samples_to_pytest_benchmark(tmp_path):
    pytest.importorskip("pytest_benchmark")
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "bench", "-q", "--benchmark-only"),
            *("--preset=smoke", "--threads=1", "--no-memory"),
            *(f"--results={ours}", f"--benchmark-json={theirs}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row.group, row.implementation): row for row in Results.load(ours).rows}
    seen = json.loads(theirs.read_text())["benchmarks"]
    assert {row.suite for row in rows.values()} == set(engine.SUITES) - {"compile"}
    assert len(rows) == len(seen) > 60
    for entry in seen:
        row = rows[entry["group"], entry["params"]["implementation"]]
        assert entry["stats"]["data"] == list(row.seconds)
        assert entry["extra_info"]["backend"] == row.backend
        assert entry["extra_info"]["gflops"] == row.gflops
