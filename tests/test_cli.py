import json
import os
import re
import subprocess
import sys

import pytest

import attnkit
from attnkit import cli, dispatch

QUICK_STEPS = 30


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def value_of(lines, name):
    """What stands beside ``name`` in two columns."""
    (found,) = [line for line in lines if re.match(rf" *{re.escape(name)}  ", line)]
    return found.split("  ", maxsplit=2 if found.startswith(" ") else 1)[-1].strip()


# --- info ---


def test_info_names_versions_machine_and_every_backend(capsys):
    import torch

    assert cli.main(["info"]) == 0
    lines = lines_of(capsys)
    assert value_of(lines, "attnkit") == attnkit.__version__
    assert value_of(lines, "torch") == torch.__version__
    for name, reason in dispatch.status().items():
        expected = "available" if reason is None else f"not available: {reason}"
        assert value_of(lines, name) == expected


def test_info_gives_the_reason_of_a_missing_backend(capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "status", lambda: {"cpu": "no compiler", "reference": None})
    assert cli.main(["info"]) == 0
    lines = lines_of(capsys)
    assert value_of(lines, "cpu") == "not available: no compiler"
    assert value_of(lines, "reference") == "available"


def test_info_shows_the_instruction_set_in_use(capsys):
    from attnkit.backends import cpu

    if not cpu.BUILT:
        pytest.skip("the extension is not built")
    assert cli.main(["info"]) == 0
    lines = lines_of(capsys)
    assert value_of(lines, "instruction set") == cpu.instruction_set()
    assert value_of(lines, "can be forced").split() == list(cpu.available_isas())


def test_info_without_the_extension_says_why(capsys, monkeypatch):
    from attnkit.backends import cpu

    monkeypatch.setattr(cpu, "BUILT", False)
    monkeypatch.setattr(cli, "build_reason", lambda *_: "no C++ compiler was found")
    assert cli.main(["info"]) == 0
    assert "  not built: no C++ compiler was found" in lines_of(capsys)


def test_info_shows_environment_variables(capsys, monkeypatch):
    monkeypatch.setenv("ATTNKIT_CPU_ISA", "portable")
    monkeypatch.delenv("ATTNKIT_BUILD_EXT", raising=False)
    assert cli.main(["info"]) == 0
    lines = lines_of(capsys)
    assert value_of(lines, "ATTNKIT_CPU_ISA").startswith("portable")
    assert value_of(lines, "ATTNKIT_BUILD_EXT").startswith("not set")


def test_info_imports_nothing_that_only_the_demo_needs():
    code = (
        "import sys; from attnkit.cli import main; main(['info']);"
        "print('loaded', [m for m in ('matplotlib', 'babel', 'tokenizers', 'rich')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


# --- explain ---


def test_explain_marks_the_backend_that_serves(capsys):
    assert cli.main(["explain", "--query", "1", "2", "16", "8", "--causal"]) == 0
    lines = lines_of(capsys)
    first = dispatch.available_backends()[0]
    assert f"-> {first}: can serve the call" in lines
    assert len([line for line in lines if line.startswith("->")]) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--keys", "20", "--kv-heads", "2", "--value-dim", "24"],
        ["--window", "3", "0", "--padding", "--bias", "--sinks", "--alibi"],
        ["--softcap", "30", "--dropout", "0.1", "--dtype", "fp64"],
    ],
)
def test_explain_takes_the_whole_call(capsys, flags):
    assert cli.main(["explain", "--query", "2", "4", "16", "8", *flags]) == 0
    assert any(line.startswith("-> ") for line in lines_of(capsys))


def test_explain_hands_the_flags_on(monkeypatch, capsys):
    import torch

    seen = {}

    def explain(query, key, value, **others):
        seen.update(others, query=query, key=key, value=value)
        answers = attnkit.explain(query, key, value)
        answers.chosen = None
        return answers

    monkeypatch.setattr(cli.functional, "explain", explain)
    flags = "--query 2 4 16 8 --keys 20 --kv-heads 2 --value-dim 24 --dtype bf16 --window 3 1"
    more = "--padding --bias --sinks --alibi --softcap 30 --dropout 0.25"
    assert cli.main(["explain", *flags.split(), *more.split()]) == 1  # none was chosen
    assert seen["query"].shape == (2, 4, 16, 8)
    assert seen["key"].shape == (2, 2, 20, 8)
    assert seen["value"].shape == (2, 2, 20, 24)
    assert {seen[n].dtype for n in ("query", "key", "value")} == {torch.bfloat16}
    assert seen["bias"].shape == (1, 4, 16, 20)
    assert seen["sinks"].shape == seen["alibi"].shape == (4,)
    assert (seen["softcap"], seen["dropout_p"]) == (30.0, 0.25)
    assert seen["mask"].lengths.tolist() == [20, 20]
    assert tuple(seen["mask"].start) == (3, 1)


def test_explain_of_a_forced_backend_that_refuses(monkeypatch, capsys):
    answers = attnkit.explain(*[__import__("torch").zeros(1, 1, 1, 8)] * 3)
    answers["cpu"] = "it is Sunday"
    monkeypatch.setattr(cli.functional, "explain", lambda *_, **__: answers)
    assert cli.main(["explain", "--backend", "cpu"]) == 1
    lines = lines_of(capsys)
    assert "   cpu: it is Sunday" in lines
    assert lines[-1] == "cpu cannot serve the call"


# --- wrong command lines ---


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "COMMAND"),
        ("trian", "invalid choice: 'trian'"),
        ("info --loud", "unrecognized arguments: --loud"),
        ("demo --seed one", "argument --seed: invalid int value: 'one'"),
        ("demo --device gpu", "argument --device: 'gpu' is not a device"),
        ("demo --device cuda:99", "argument --device: 'cuda:99', but torch .* sees . CUDA devices"),
        ("explain --query 1 8 64", "argument --query: expected 4 arguments"),
        ("explain --query 1 8 -4 64", "argument --query: -4, expected no negative size"),
        ("explain --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("explain --backend gpu", "argument --backend: 'gpu', expected one of cpu, .*reference"),
        ("explain --kv-heads 3", "such a call is refused: .*3.*8"),
        ("explain --dropout 2", "such a call is refused: .*dropout.*2"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys, command, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(command.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert lines_of(capsys) == [f"attnkit {attnkit.__version__}"]


def test_the_package_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "attnkit", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"attnkit {attnkit.__version__}"


# --- demo ---


def test_the_demo_names_the_extra_that_is_missing(capsys, monkeypatch):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == "babel" else find(name)
    )
    assert cli.main(["demo", "--quick"]) == 2
    error = capsys.readouterr().err
    assert "attnkit demo needs babel" in error
    assert "pip install 'attnkit[demo]'" in error


@pytest.fixture(scope="module")
def quick_demo(tmp_path_factory):
    """Exit status, lines printed and output folder of one quick run of the demo."""
    for name in cli.DEMO_MODULES:
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("demo") / "new"
    done = subprocess.run(
        [sys.executable, "-m", "attnkit", "demo", "--quick", "--device=cpu", f"--output={folder}"],
        capture_output=True,
        text=True,
        check=False,
        # sizes this small gain nothing from threads, and lose much where the cores are busy
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines(), folder


def test_the_demo_goes_through_its_six_steps(quick_demo):
    status, lines, _ = quick_demo
    assert status == 0, lines
    for number in range(1, 7):
        assert sum(line.startswith(f"{number} of 6 ") for line in lines) == 1
    text = "\n".join(lines)
    assert "backend reference: available" in text
    assert "WRONG" not in text
    assert re.fullmatch(r"exact match \d+\.\d%", lines[-1])


def test_the_demo_leaves_pictures_and_one_page_that_needs_no_other_file(quick_demo):
    _, _, folder = quick_demo
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "attention.png",
        "benchmark.json",
        "index.html",
        "model",
        "results.json",
        "speed.png",
        "training.png",
    }
    for name in ("attention.png", "speed.png", "training.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    page = (folder / "index.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "url(" not in page
    for language in ("Arabic", "Chinese", "Hungarian"):
        assert f"<summary>{language}</summary>" in page
    # every opening tag of these has its end
    for tag in ("table", "tr", "td", "th", "details", "main", "div"):
        assert len(re.findall(rf"<{tag}\b", page)) == page.count(f"</{tag}>")


def test_the_demo_writes_its_numbers(quick_demo):
    from attnkit.benchmark import Results

    _, lines, folder = quick_demo
    numbers = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert numbers["schema"] == "attnkit.demo"
    assert numbers["quick"] is True
    assert numbers["training"]["steps"] == len(numbers["training"]["losses"]) == QUICK_STEPS
    assert numbers["test"]["translations"] == 2 * 14
    assert set(numbers["backends"]) == set(dispatch.BACKENDS)
    rows = {(row["backend"], row["dtype"]) for row in numbers["errors"]}
    assert {(name, "fp32") for name in dispatch.available_backends()} <= rows
    assert ("naive", "bf16") in rows
    assert [(g["num_beams"], g["use_cache"]) for g in numbers["generation"]] == [
        (1, True),
        (1, False),
        (4, True),
        (4, False),
    ]
    assert lines[-1] == f"exact match {100 * numbers['test']['exact_match']:.1f}%"
    speeds = Results.load(folder / "benchmark.json")
    assert {row.implementation for row in speeds.rows} == {"attnkit", "torch", "naive"}


# --- what fails a run ---


@pytest.fixture(scope="module")
def report():
    pytest.importorskip("rich")
    from attnkit import benchmark
    from attnkit.recipes import date_translation, demo

    return demo.Report(
        options=demo.Options(),
        created="now",
        machine=benchmark.describe_machine(),
        versions=benchmark.describe_versions(),
        commit=None,
        backends={},
        error_rows=[demo.ErrorRow("cpu", "fp32", 1e-5, {"out": 1e-6, "dq": 1e-5})],
        speeds=benchmark.Results.here([], {}),
        history=date_translation.History(),
        score=date_translation.Score(1000, 995, 14_000, ()),
        generation=date_translation.GenerationCheck((), 10, 0),
        seconds={},
    )


def test_a_good_run_has_no_failures(report):
    from attnkit.recipes.demo import find_failures

    assert find_failures(report) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda t, d: {"score": t.Score(1000, 940, 14_000, (None,) * 71)},
            "99.4% of the translations of 1000 held-out dates",
        ),
        (lambda t, d: {"generation": t.GenerationCheck((), 10, 2)}, "2 of 10 generated sequences"),
        (
            lambda t, d: {"error_rows": [d.ErrorRow("cpu", "bf16", 1e-2, {"dv": 2e-2})]},
            "cpu bf16 is off by more than 0.01",
        ),
        (
            lambda t, d: {"error_rows": [d.ErrorRow("cpu", "bf16", 1e-2, {"dv": float("nan")})]},
            "cpu bf16 is off",
        ),
    ],
)
def test_what_should_have_held_is_a_failure(report, change, sentence):
    from dataclasses import replace

    from attnkit.recipes import date_translation, demo

    (failure,) = demo.find_failures(replace(report, **change(date_translation, demo)))
    assert failure.startswith(sentence)


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100.0%"), (0.995, "99.5%"), (0.99499, "99.4%"), (0.0, "0.0%")]
)
def test_percent_never_rounds_up(share, text):
    pytest.importorskip("rich")
    from attnkit.recipes.demo import percent

    assert percent(share) == text


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m attnkit info | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120
    )
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
