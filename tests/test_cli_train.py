"""``attnkit train`` and ``attnkit generate`` from the command line to the files of a run."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnkit import cli

for needed in ("babel", "tokenizers", "rich", "matplotlib", "sacrebleu"):
    pytest.importorskip(needed)

TINY = {
    "steps": 6,
    "warmup": 2,
    "batch_tokens": 256,
    "validate_every": 3,
    "checkpoint_every": 3,
    "d_model": 16,
    "num_heads": 2,
    "num_layers": 1,
    "d_ff": 32,
    "vocab_size": 300,
    "device": "cpu",
}
LAST_LINES = {
    "translate": r"BLEU \d+\.\d  chrF \d+\.\d  exact \d+\.\d%  on \d+ held-out sentences, 2 beams",
    "lm": r"perplexity \d+\.\d\d  5-gram \d+\.\d\d  on \d+ held-out subwords of \d+ documents",
    "classify": r"accuracy \d+\.\d\d%  on \d+ held-out texts of 2 classes",
}


def write_data(folder):
    """A config of each recipe, with data of its own; some of the words are no ASCII."""
    words = ["kalt", "warm", "früh", "spät", "grün", "rot", "日本"]
    lines = [" ".join(words[(i * k) % 7] for k in (1, 2, 3, 5)) + f" {i}" for i in range(60)]
    (folder / "a.txt").write_text("\n\n".join(lines), encoding="utf-8")
    (folder / "src").write_text("\n".join(lines), encoding="utf-8")
    (folder / "tgt").write_text("\n".join(line.upper() for line in lines), encoding="utf-8")
    labelled = [f"{'odd' if i % 2 else 'even'}\t{line}" for i, line in enumerate(lines)]
    (folder / "a.tsv").write_text("\n".join(labelled), encoding="utf-8")
    own = {
        "translate": {
            "source": str(folder / "src"),
            "target": str(folder / "tgt"),
            "num_beams": 2,
            "held_out": 0.3,
            "batch_tokens": 100,  # several batches to validate with
        },
        "lm": {"text": str(folder / "a.txt"), "context": 32, "samples": 1},
        "classify": {"data": str(folder / "a.tsv")},
    }
    for recipe, keys in own.items():
        content = json.dumps({**TINY, **keys, "output": str(folder / recipe)})
        (folder / f"{recipe}.json").write_text(content)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run of each recipe, and what each printed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    printed = {}
    for recipe in cli.RECIPES:
        with pytest.MonkeyPatch.context() as patch:
            out = (folder / f"{recipe}.out").open("w+", encoding="utf-8")
            patch.setattr(sys, "stdout", out)
            assert cli.main(["train", recipe, "--config", str(folder / f"{recipe}.json")]) == 0
        out.seek(0)
        printed[recipe] = out.read().splitlines()
        out.close()
    return folder, printed


@pytest.mark.parametrize("recipe", cli.RECIPES)
def test_a_recipe_prints_its_figure_and_leaves_a_run(runs, recipe):
    folder, printed = runs
    lines = printed[recipe]
    assert re.fullmatch(LAST_LINES[recipe], lines[-1]), lines
    assert len([line for line in lines if line.startswith("step ")]) == 2
    run = folder / recipe
    names = {path.name for path in run.iterdir()}
    confusion = {"confusion.png"} if recipe == "classify" else set()
    assert names == {"checkpoint.safetensors", "model", "curve.csv", "curve.png"} | confusion
    for path in run.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    model = {path.name for path in (run / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= model
    with (run / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(float(row["loss"]) > 0 for row in rows)
    assert [row["step"] for row in rows if row["validation_loss"]] == ["3", "6"]


def test_a_finished_run_is_not_replaced_unasked(runs, capsys):
    folder, _ = runs
    config = ["train", "classify", "--config", str(folder / "classify.json")]
    with pytest.raises(SystemExit) as caught:
        cli.main(config)
    assert caught.value.code == 2
    assert "holds a run already: --resume goes on with it" in capsys.readouterr().err
    before = (folder / "classify" / "curve.csv").read_text()
    assert cli.main([*config, "--resume"]) == 0
    assert re.fullmatch(LAST_LINES["classify"], capsys.readouterr().out.splitlines()[-1])
    assert (folder / "classify" / "curve.csv").read_text() == before


def test_a_run_is_replaced_when_asked_and_repeats_itself_to_the_bit(runs, tmp_path):
    folder, _ = runs
    config = ["train", "lm", "--config", str(folder / "lm.json"), "--output", str(tmp_path / "b")]
    assert cli.main(config) == 0
    first = load_file(tmp_path / "b" / "model" / "model.safetensors")
    assert cli.main([*config, "--overwrite"]) == 0
    second = load_file(tmp_path / "b" / "model" / "model.safetensors")
    original = load_file(folder / "lm" / "model" / "model.safetensors")
    for name, tensor in original.items():
        assert torch.equal(tensor, first[name])
        assert torch.equal(tensor, second[name])


def test_a_longer_run_goes_on_from_a_shorter_one(runs, tmp_path, capsys):
    folder, _ = runs
    flags = ["train", "lm", "--config", str(folder / "lm.json"), "--output", str(tmp_path)]
    flags += ["--schedule", "inverse-sqrt"]
    assert cli.main([*flags, "--steps", "3"]) == 0
    assert cli.main([*flags, "--steps", "6", "--resume"]) == 0
    steps = re.findall(r"^step +(\d+)", capsys.readouterr().out, re.MULTILINE)
    assert steps == ["3", "6"]
    assert cli.main([*flags, "--steps", "6", "--output", str(tmp_path / "whole")]) == 0
    files = (path / "model" / "model.safetensors" for path in (tmp_path, tmp_path / "whole"))
    one, other = map(load_file, files)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("task", ["translate", "lm", "classify", "both-tokens"])
def test_the_default_data_needs_no_file(tmp_path, capsys, task):
    recipe = "classify" if task == "both-tokens" else task
    tiny = {**TINY, "steps": 1, "validate_every": 1, "checkpoint_every": 1}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in tiny.items()]
    flags += {"translate": ["--dates=100", "--num-beams=2"], "lm": ["--samples=0"]}.get(task, [])
    flags += ["--task=both-tokens"] if task == "both-tokens" else []
    assert cli.main(["train", recipe, *flags, f"--output={tmp_path / 'r'}"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    pattern = LAST_LINES[recipe].replace("2 classes", "(2|24) classes")
    assert re.fullmatch(pattern, last), last


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_only(runs, tmp_path, terminal):
    from rich.console import Console

    from attnkit.recipes import classify

    options = classify.Options.from_command_line({"output": tmp_path}, runs[0] / "classify.json")
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=120, highlight=False)
    assert classify.main(options, console) == 0
    assert ("6/6" in shown.getvalue()) == terminal
    assert "accuracy" in shown.getvalue()


# --- several processes ---


def test_two_processes_train_as_one(runs, tmp_path, capsys):
    folder, _ = runs
    config = [f"--config={folder / 'translate.json'}", f"--output={tmp_path}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", "-m", "attnkit", "train", "translate", *config],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(LAST_LINES["translate"], lines[-1]), lines
    assert len([line for line in lines if line.startswith("step ")]) == 2  # one process prints
    losses, validations = [], []
    for path in (folder / "translate" / "curve.csv", tmp_path / "curve.csv"):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        losses.append([float(row["loss"]) for row in rows])
        validations.append([float(row["validation_loss"] or 0) for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert validations[0] == pytest.approx(validations[1], rel=1e-5)
    files = (p / "model" / "model.safetensors" for p in (folder / "translate", tmp_path))
    one, two = map(load_file, files)
    for name, tensor in one.items():
        # the gradient of a key's bias is nothing but rounding, which Adam makes steps of
        if tensor.dim() > 1:
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
    saved = load_file(tmp_path / "checkpoint.safetensors")
    assert {name for name in saved if name.startswith("random.")} == {"random.0", "random.1"}
    with pytest.raises(SystemExit):
        cli.main(["train", "translate", *config, "--resume"])
    assert re.search(r"there are 1 processes, but .* was written by 2", capsys.readouterr().err)


# --- generate ---


def generated(capsys, *flags):
    assert cli.main(["generate", *flags]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_a_language_model_goes_on_from_its_prompt(runs, capsys):
    model = f"--model={runs[0] / 'lm'}"
    greedy = generated(capsys, model, "--prompt=kalt", "--max-length=12")
    assert greedy.startswith("kalt")
    assert generated(capsys, model, "--prompt=kalt", "--max-length=12") == greedy
    assert len(greedy) > len("kalt")
    drawn = [
        generated(capsys, model, "--max-length=12", "--temperature=1.5", "--top-k=50", *seed)
        for seed in (["--seed=1"], ["--seed=2"], ["--seed=1"], ["--seed=1", "--top-p=0.5"])
    ]
    assert drawn[0] == drawn[2]
    assert len(set(drawn)) == 3


def test_a_translation_streams_the_same_text_that_one_beam_finds(runs, capsys):
    model, prompt = f"--model={runs[0] / 'translate' / 'model'}", "--prompt=warm rot 日本"
    from attnkit.recipes import generate
    from attnkit.recipes.translate import translate

    found = generated(capsys, model, prompt)
    loaded, words = generate.load(runs[0] / "translate", "cpu", generate.MODELS)
    assert found == translate(loaded, words, ["warm rot 日本"], num_beams=1)[0]
    beams = generated(capsys, model, prompt, "--num-beams=3")
    assert beams == translate(loaded, words, ["warm rot 日本"], num_beams=3)[0]


def test_text_comes_in_whole_characters(monkeypatch):
    from argparse import Namespace

    from attnkit.models import CausalLM
    from attnkit.recipes import generate
    from attnkit.recipes.language_model import Options, build
    from attnkit.recipes.subwords import Subwords

    words = Subwords.train(["abc"], 259)  # every byte is a token
    model = build(Options(d_model=8, num_heads=2, num_layers=1, d_ff=8), words.vocab_size).eval()
    (ids,) = words.encode(["aé日🙂b"])
    tokens = [torch.tensor([i]) for i in ids]
    monkeypatch.setattr(CausalLM, "stream", lambda *_, **__: iter(tokens))
    options = Namespace(
        prompt="", num_beams=1, max_length=None, temperature=None, top_k=None, top_p=None, seed=0
    )
    found = [piece for piece in generate.pieces(model, words, options) if piece]
    assert found == ["a", "é", "日", "🙂", "b"]


# --- wrong command lines ---


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train", "arguments are required: RECIPE"),
        ("train speech", "invalid choice: 'speech'"),
        ("train lm --stepz 3", "unrecognized arguments: --stepz"),
        ("train lm --steps three", "argument --steps: invalid int value: 'three'"),
        ("train lm --steps 0", "steps is 0, expected 1 or more"),
        ("train lm --text none.txt", "--text none.txt is not a file"),
        ("train lm --config none.json", "config none.json is not a file"),
        ("train lm --vocab-size 100", "vocab_size is 100, expected 259 or more"),
        ("train lm --device gpu", "argument --device: 'gpu' is not a device"),
        ("train lm --schedule flat", "argument --schedule: invalid choice: 'flat'"),
        ("train translate --source a", "source is given without target"),
        ("train classify --data none.tsv", "--data none.tsv is not a file"),
        ("train classify --task other", "argument --task: invalid choice: 'other'"),
        ("generate", "arguments are required: --model"),
        ("generate --model none", r"--model none: none/config\.json is missing"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys, command, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(command.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("lm --top-p 7", "top_p is 7"),
        ("lm --num-beams 2 --temperature 1", "num_beams 2, expected 1: beams are not drawn"),
        ("lm --max-length 1000", "max_length is 1000"),
        ("lm --prompt " + "x" * 99, r"--prompt has \d+ tokens, expected fewer than 32"),
        ("classify", "--model .*classify is a Classifier, expected one of CausalLM"),
    ],
)
def test_wrong_generation_is_refused(runs, capsys, flags, message):
    recipe, *rest = flags.split()
    with pytest.raises(SystemExit):
        cli.main(["generate", "--model", str(runs[0] / recipe), *rest])
    error = capsys.readouterr().err
    assert re.search(message, error), error


@pytest.mark.parametrize("command", ["train translate", "generate --model x"])
def test_a_missing_extra_is_named(capsys, monkeypatch, command):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find(name)
    )
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert re.search(r"attnkit (train translate|generate) needs tokenizers", error)
    assert "pip install 'attnkit[train]'" in error


def test_a_key_that_only_another_recipe_knows_is_refused(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text('{"context": 5}')
    with pytest.raises(SystemExit):
        cli.main(["train", "classify", "--config", str(path)])
    assert re.search(r"c\.json: unknown key 'context'", capsys.readouterr().err)


def test_help_of_a_recipe_lists_its_options(capsys):
    for command in ("train lm --help", "train translate --help", "generate --help"):
        with pytest.raises(SystemExit) as caught:
            cli.main(command.split())
        assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "usage: attnkit train lm" in text
    assert "--vocab-size" in text
    assert "usage: attnkit generate" in text


def test_other_commands_import_no_recipe():
    code = (
        "import sys; from attnkit.cli import main; main(['explain']);"
        "print([m for m in sys.modules if m.startswith('attnkit.recipes')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_interrupted_run_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    from attnkit.recipes import classify

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(classify, "main", interrupted)
    assert cli.main(["train", "classify", "--output", str(Path(tmp_path))]) == 130
    assert "--resume goes on" in capsys.readouterr().err
