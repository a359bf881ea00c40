"""Attention taken out of models by hooks: the weights, their pools, what is said of the heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import attnkit.nn
from attnkit import viz
from attnkit.masks import causal
from attnkit.models import Seq2SeqConfig, Seq2SeqTransformer
from attnkit.recording import RecordedAttention, record


def weights_of_torch(module: nn.MultiheadAttention, x, **masks):
    with torch.no_grad():
        return module(x, x, x, need_weights=True, average_attn_weights=False, **masks)[1]


@pytest.mark.parametrize("library", [nn, attnkit.nn], ids=["torch", "attnkit"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_weights_are_those_that_torch_returns(library, batch_first, mask):
    module = library.MultiheadAttention(24, 4, batch_first=batch_first)
    x = torch.randn(2, 6, 24) if batch_first else torch.randn(6, 2, 24)
    masks = {}
    if mask == "causal":
        masks = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(6)}
    if mask == "padding":
        masks = {"key_padding_mask": torch.arange(6) >= torch.tensor([[6], [4]])}
    twin = nn.MultiheadAttention(24, 4, batch_first=batch_first)
    twin.load_state_dict(module.state_dict())
    expected = weights_of_torch(twin, x, **masks)
    with record(module) as layers:
        module(x, x, x, need_weights=False, **masks)
    (layer,) = layers
    assert (layer.name, layer.kind, layer.shape) == ("", "self", (2, 4, 6, 6))
    torch.testing.assert_close(layer.weights(), expected)
    torch.testing.assert_close(layer.weights(rows=[4, 1], heads=2), expected[:, 2:3, [4, 1]])


@pytest.mark.parametrize("nested", [False, True])
def test_a_whole_transformer_of_torch_runs_as_it_is(nested):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        with record(model) as layers:
            found = model(x, src_key_padding_mask=padding)
        expected = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding])
    assert [layer.name for layer in layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    for layer in layers:
        assert torch.equal(layer.weights()[1, :, :, 3:], torch.zeros(2, 5, 2))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_self_and_cross_attention_of_an_encoder_decoder():
    model = attnkit.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    with record(model) as layers:
        model(torch.randn(1, 4, 16), torch.randn(1, 3, 16))
    assert [(layer.kind, layer.shape) for layer in layers] == [
        ("self", (1, 2, 4, 4)),
        ("self", (1, 2, 3, 3)),
        ("cross", (1, 2, 3, 4)),
    ]


def test_attention_of_the_own_models_by_name():
    config = Seq2SeqConfig(
        src_vocab=11,
        tgt_vocab=11,
        d_model=16,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        max_length=8,
    )
    model = Seq2SeqTransformer(config).eval()
    src, tgt = torch.randint(3, 11, (2, 5)), torch.randint(3, 11, (2, 4))
    with record(model, names=lambda name: "cross" in name) as layers:
        model(src, tgt)
    assert [layer.kind for layer in layers] == ["cross", "cross"]
    torch.testing.assert_close(layers[1].weights(), model.attention_maps(src, tgt, 1, "cross"))


def test_training_goes_on_as_it_would():
    module = attnkit.nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.5)
    x = torch.randn(1, 4, 8, requires_grad=True)
    torch.manual_seed(1)
    expected = torch.autograd.grad(module(x, x, x)[0].sum(), x)
    torch.manual_seed(1)
    with record(module) as layers:
        found = torch.autograd.grad(module(x, x, x)[0].sum(), x)
    assert torch.equal(found[0], expected[0])
    assert not layers[0].weights().requires_grad
    torch.testing.assert_close(layers[0].weights().sum(-1), torch.ones(1, 2, 4))  # no dropout


def layer_of(query, key, **options) -> RecordedAttention:
    return RecordedAttention("x", "self", {"query": query, "key": key, **options})


def test_pools_are_means_over_queries_of_sums_over_keys(monkeypatch):
    monkeypatch.setattr("attnkit.recording._TILE", 40)  # a few rows at a time
    layer = layer_of(torch.randn(2, 3, 12, 4), torch.randn(2, 3, 20, 4))
    weights = layer.weights()
    torch.testing.assert_close(layer.pooled(20), weights)
    expected = weights.unflatten(3, (4, 5)).sum(4).unflatten(2, (4, 3)).mean(3)
    torch.testing.assert_close(layer.pooled(4), expected)
    # 12 queries in five bins, in order and as even as can be
    means = torch.stack([x.mean(1) for x in weights[0].split([3, 2, 3, 2, 2], dim=1)], dim=1)
    torch.testing.assert_close(layer.pooled(5)[0], means.unflatten(2, (5, 4)).sum(3))


def test_queries_that_see_nothing_do_not_count():
    mask = causal() & attnkit.masks.padding(torch.tensor([0]))
    layer = layer_of(torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4), mask=mask)
    assert torch.equal(layer.pooled(2), torch.zeros(1, 2, 2, 2))
    assert all(torch.equal(value, torch.zeros(1, 2)) for value in layer.summary())


def test_summary_of_heads_that_are_known(monkeypatch):
    monkeypatch.setattr("attnkit.recording._TILE", 16)
    key = 200 * torch.eye(6)[None, None]
    ahead = torch.eye(6).roll(1, dims=1)  # query i looks at key i + 1, the last at the first
    query = torch.stack([torch.zeros(6, 6), ahead])[None]
    entropy, distance, first = layer_of(query, key.expand(1, 2, 6, 6)).summary()
    torch.testing.assert_close(entropy, torch.tensor([[math.log(6), 0.0]]))
    torch.testing.assert_close(distance, torch.tensor([[35 / 18, 10 / 6]]))
    torch.testing.assert_close(first, torch.tensor([[1 / 6, 1 / 6]]))


def test_a_long_sequence_needs_no_square(monkeypatch):
    monkeypatch.setattr("attnkit.recording._TILE", 1 << 16)
    length = 5000
    largest = 0
    original = RecordedAttention.weights

    def watched(self, rows=None, heads=None):
        nonlocal largest
        found = original(self, rows, heads)
        largest = max(largest, found.numel())
        return found

    monkeypatch.setattr(RecordedAttention, "weights", watched)
    layer = layer_of(torch.randn(1, 1, length, 4), torch.randn(1, 1, length, 4), mask=causal())
    torch.testing.assert_close(layer.pooled(64).sum(-1), torch.ones(1, 1, 64))
    assert largest <= 1 << 16


def test_what_cannot_be_recorded_is_said():
    without = pytest.raises(ValueError, match="model is a Linear without attention modules")
    with without, record(nn.Linear(2, 2)):
        pass
    module = attnkit.nn.MultiheadAttention(8, 2)
    unnamed = pytest.raises(ValueError, match="that names accepts")
    with unnamed, record(module, names=lambda name: False):
        pass
    layer = layer_of(torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4))
    with pytest.raises(ValueError, match="size is 0, expected 1 or more"):
        layer.pooled(0)


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    layer = layer_of(torch.randn(1, 3, 40, 4), torch.randn(1, 3, 40, 4))
    grid = viz.head_grid(
        [("one", layer.pooled(16)[0]), ("two", layer.pooled(8)[0, :2])], tmp_path / "g.png"
    )
    values = [value[0] for value in layer.summary()]
    summary = viz.head_summary(
        [("one", values), ("two", [v[:2] for v in values])], tmp_path / "s.png"
    )
    for path in (grid, summary):
        assert path.read_bytes().startswith(b"\x89PNG")
    for draw in (viz.head_grid, viz.head_summary):
        with pytest.raises(ValueError, match="layers is empty"):
            draw([], tmp_path / "none.png")
