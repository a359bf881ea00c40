"""``attnkit heatmap``: what is drawn are the weights of the model, beside the right tokens."""

import re

import pytest
import torch

from attnkit import cli, viz
from attnkit.models import (
    CausalLM,
    Classifier,
    Seq2SeqConfig,
    Seq2SeqTransformer,
    TransformerConfig,
)

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from attnkit.recipes import generate, heatmap
from attnkit.recipes.subwords import BOS_ID, EOS_ID, Subwords

SOURCE, TARGET = "kalt und\twarm", "cold 日"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Untrained models of each kind, as a run leaves them."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    words = Subwords.train(["kalt und warm", "kalt und warm"], 280)
    size = words.vocab_size
    sizes = {"dropout": 0.3, "max_length": 80}
    models = {
        "lm": CausalLM(TransformerConfig(size, 16, 4, 3, positions="rope", **sizes)),
        "classify": Classifier(
            TransformerConfig(size, 16, 4, 2, num_classes=2, pooling="attention", **sizes)
        ),
        "translate": Seq2SeqTransformer(Seq2SeqConfig(size, size, 16, 4, 3, 2, 32, **sizes)),
    }
    for name, model in models.items():
        model.save_pretrained(root / name / "model")
        words.save(root / name / "model")
    return root


@pytest.fixture
def drawn(monkeypatch):
    """What each function of viz was asked to draw; the pictures are written as well."""
    calls = []

    def watch(name):
        draw = getattr(viz, name)

        def watched(content, path, **options):
            calls.append((name, content, options))
            return draw(content, path, **options)

        monkeypatch.setattr(viz, name, watched)

    for name in ("heat_maps", "head_grid", "head_summary"):
        watch(name)
    return calls


def run(folder, tmp_path, *flags) -> list[str]:
    """The names of the pictures."""
    command = ["heatmap", "--model", str(folder), "-o", str(tmp_path / "deep" / "h.png"), *flags]
    assert cli.main(command) == 0
    found = sorted((tmp_path / "deep").iterdir())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
    return [path.name for path in found]


@pytest.mark.parametrize("kind", ["cross", "self", "encoder"])
@pytest.mark.parametrize("layer", ["1", "-1"])
def test_a_layer_of_a_translation(folder, tmp_path, drawn, kind, layer):
    flags = ("--text", SOURCE, "--target", TARGET, "--kind", kind, "--layer", layer)
    assert run(folder / "translate", tmp_path, *flags) == ["h.png"]
    model = Seq2SeqTransformer.from_pretrained(folder / "translate" / "model")
    words = Subwords.load(folder / "translate" / "model")
    source, target = words.encode([SOURCE, TARGET])
    source, target = torch.tensor([[*source, EOS_ID]]), torch.tensor([[BOS_ID, *target]])
    expected = model.attention_maps(source, target, int(layer), kind)[0]
    ((name, maps, _),) = drawn
    assert (name, [one.title for one in maps]) == ("heat_maps", [f"head {h}" for h in range(4)])
    torch.testing.assert_close(torch.stack([one.weights for one in maps]), expected)
    assert len({one.weights[-1, 0].item() for one in maps}) == 4
    said = {"source": "kalt␣und⇥warm<eos>", "target": "<bos>cold␣" + "\ufffd" * 3}
    rows = "source" if kind == "encoder" else "target"
    columns = "target" if kind == "self" else "source"
    assert ("".join(maps[0].rows), "".join(maps[0].columns)) == (said[rows], said[columns])


def test_a_translation_of_its_own_where_none_is_given(folder):
    place = folder / "translate" / "model"
    model, words = Seq2SeqTransformer.from_pretrained(place), Subwords.load(place)
    reading = heatmap.read(model, words, SOURCE, None, "self")
    (written,) = model.generate(torch.tensor([[*words.encode([SOURCE])[0], EOS_ID]]), 79).tokens
    told = [token for token in written.tolist() if token != EOS_ID]
    assert told
    assert reading.rows == ["<bos>", *(words.decode([token]).replace(" ", "␣") for token in told)]
    assert reading.layers[0].shape[2] == len(reading.rows)


@pytest.mark.parametrize("model", ["lm", "classify"])
def test_one_head_of_a_single_stack(folder, tmp_path, drawn, model):
    assert run(
        folder / model / "model", tmp_path, "--text", "kalt warm", "--layer", "1", "--head", "2"
    ) == ["h.png"]
    ((name, (one,), options),) = drawn
    assert (name, one.title) == ("heat_maps", "head 2")
    assert options["title"] == "layers.1.self_attn, self-attention"
    assert "".join(one.rows) == "<bos>kalt␣warm" + ("<eos>" if model == "classify" else "")
    assert one.rows == one.columns
    loaded = generate.load(folder / model, "cpu", heatmap.MODELS)
    reading = heatmap.read(*loaded, "kalt warm", None, None)
    torch.testing.assert_close(one.weights, reading.layers[1].weights()[0, 2])
    torch.testing.assert_close(one.weights.sum(-1), torch.ones(len(one.rows)))
    assert bool(one.weights.triu(1).any()) == (model == "classify")


def test_all_layers_and_what_their_heads_do(folder, tmp_path, drawn):
    assert run(folder / "lm", tmp_path, "--text", SOURCE) == ["h-summary.png", "h.png"]
    (grid, layers, options), (summary, done, _) = drawn
    assert (grid, summary) == ("head_grid", "head_summary")
    assert [name for name, _ in layers] == ["layer 0", "layer 1", "layer 2"]
    assert [tuple(weights.shape) for _, weights in layers] == [(4, *options["length"])] * 3
    for (_, weights), (_, (entropy, _, first)) in zip(layers, done, strict=True):
        torch.testing.assert_close(first, weights[:, :, 0].mean(1))
        logs = weights.clamp(min=1e-30).log()
        torch.testing.assert_close(entropy, -(weights * logs).sum(2).mean(1))


def test_a_long_text_is_pooled_and_has_no_labels(folder, tmp_path, drawn):
    flags = ("--text", "日" * 20, "--layer", "0")
    run(folder / "lm", tmp_path, *flags)
    run(folder / "lm", tmp_path, *flags, "--head", "-1")
    (name, ((_, weights),), options), (_, ((_, last),), chosen) = drawn
    assert (name, options["length"], options["heads"]) == ("head_grid", (61, 61), [0, 1, 2, 3])
    assert weights.shape == (4, 61, 61)
    assert chosen["heads"] == [3]
    assert torch.equal(last[0], weights[3])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("lm", "arguments are required: --text"),
        ("lm --text a --kind cross", "--kind cross: a CausalLM has self only"),
        ("lm --text a --kind all", "argument --kind: invalid choice: 'all'"),
        ("classify --text a --target b", "--target is for translations: the model is a Classifier"),
        ("lm --text a --layer 3", "--layer is 3, expected -3 to 2"),
        ("translate --text a --target b --layer 2", "--layer is 2, expected -2 to 1"),
        ("lm --text a --layer 0 --head -5", "--head is -5, expected -4 to 3"),
        ("lm --text a --head 0", "--head 0 is given without --layer"),
        ("lm --text " + "x" * 80, "--text has 81 tokens, special ones included, expected at most"),
        ("translate --text a --target " + "x" * 80, "--target has 81 tokens"),
        ("none --text a", r"--model .*none: .*config\.json is missing"),
    ],
)
def test_a_wrong_command_line_is_refused(folder, tmp_path, capsys, flags, message):
    model, *rest = flags.split()
    with pytest.raises(SystemExit) as caught:
        cli.main(["heatmap", "--model", str(folder / model), "-o", str(tmp_path / "h.png"), *rest])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_named(capsys, monkeypatch):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert cli.main(["heatmap", "--model", "x", "--text", "y"]) == 2
    assert "attnkit heatmap needs matplotlib" in capsys.readouterr().err
