"""Configurations: every wrong value is named; models and their files."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from attnkit.models import (
    CausalLM,
    Classifier,
    Seq2SeqConfig,
    Seq2SeqTransformer,
    TransformerConfig,
)

TINY = TransformerConfig(13, 16, 4, 2, 24, max_length=20)
PAIR = Seq2SeqConfig(11, 13, 16, 4, 1, 2, 24, max_length=20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0, expected 1 or more"),
        ({"vocab_size": 2.0}, "vocab_size is 2.0, expected an int"),
        ({"d_model": True}, "d_model is True, expected an int"),
        ({"d_model": 18}, "d_model is 18, expected a multiple of num_heads, 4"),
        ({"num_heads": -1}, "num_heads is -1, expected 1 or more"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of num_heads, 4"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0, expected 1 or more"),
        ({"num_layers": "2"}, "num_layers is '2', expected an int"),
        ({"d_ff": 0}, "d_ff is 0, expected 1 or more"),
        ({"d_ff": 1.5}, "d_ff is 1.5, expected an int or None"),
        ({"dropout": -0.1}, "dropout is -0.1, expected 0 to 1"),
        ({"dropout": float("nan")}, "dropout is nan, expected 0 to 1"),
        ({"dropout": "0.1"}, "dropout is '0.1', expected a number"),
        ({"activation": "tanh"}, "activation is 'tanh', expected one of ['relu', 'gelu', 's"),
        ({"norm": "batch"}, "norm is 'batch', expected one of ['layer', 'rms']"),
        ({"norm_first": 1}, "norm_first is 1, expected a bool"),
        ({"bias": None}, "bias is None, expected a bool"),
        ({"tie_embeddings": "no"}, "tie_embeddings is 'no', expected a bool"),
        ({"positions": "rotary"}, "positions is 'rotary', expected one of ['sinusoidal', "),
        ({"rope_theta": 5.0}, "rope_theta is 5.0, expected 10000.0 with positions 'sinusoidal'"),
        ({"rope_dim": 2}, "rope_dim is 2, expected None with positions 'sinusoidal'"),
        ({"positions": "rope", "rope_dim": 3}, "rope_dim is 3, expected an even number, at most"),
        ({"positions": "rope", "rope_dim": 6}, "rope_dim is 6, expected an even number, at most"),
        ({"positions": "rope", "num_heads": 16}, "head_dim is 1, expected an even number"),
        ({"positions": "rope", "rope_theta": 0.5}, "rope_theta is 0.5, expected 1 or more"),
        ({"positions": "rope", "rope_interleaved": 0}, "rope_interleaved is 0, expected a bool"),
        ({"positions": "rope", "rope_scaling": "x"}, "rope_scaling is 'x', expected one of [None"),
        ({"positions": "rope", "rope_factor": 2}, "rope_factor is 2, expected 1 unless rope_"),
        ({"positions": "rope", "rope_factor": float("inf")}, "rope_factor is inf, expected 1 or m"),
        (
            {"positions": "rope", "rope_scaling": "ntk", "rope_dim": 2},
            "rope_scaling is 'ntk', expected None or 'linear'",
        ),
        ({"window": 0}, "window is 0, expected None, an int of 1 or more, or a tuple of these"),
        ({"window": (3, "4")}, "window is (3, '4'), expected None, an int of 1 or more"),
        ({"window": (3,)}, "window is (3,), expected 2 entries, one for each of num_layers"),
        ({"max_length": 0}, "max_length is 0, expected 1 or more"),
        ({"pad_id": 13}, "pad_id is 13, expected 0 to 12, below vocab_size, or None"),
        ({"eos_id": -1}, "eos_id is -1, expected 0 to 12"),
        ({"bos_id": 1.0}, "bos_id is 1.0, expected 0 to 12"),
        ({"bos_id": 2}, "'bos_id': 2, 'eos_id': 2} are not 3 different ids"),
        ({"num_classes": 0}, "num_classes is 0, expected 1 or more"),
        ({"pooling": "max"}, "pooling is 'max', expected one of ['first', 'mean', 'attention']"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of num_heads, 4"),
        ({"src_vocab": None}, "src_vocab is None, expected an int"),
        ({"pad_id": None}, "pad_id is None, expected 0 to 12, below tgt_vocab"),
        ({"eos_id": None}, "eos_id is None, expected 0 to 12, below tgt_vocab"),
        (
            {"window": (3, 4)},
            "window is (3, 4), expected 1 entries, one for each of num_encoder_la",
        ),
        ({"share_embeddings": 1}, "share_embeddings is 1, expected a bool"),
    ],
)
def test_a_wrong_value_of_a_pair_of_stacks_is_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(PAIR, **changes)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        dataclasses.replace(TINY, window=(3, None), bos_id=None, num_classes=4, pooling="first"),
        dataclasses.replace(TINY, positions="rope", rope_scaling="ntk", rope_factor=2.0),
        PAIR,
        dataclasses.replace(PAIR, positions="alibi", norm="rms", num_kv_heads=1, window=5),
    ],
)
def test_json_there_and_back(config):
    text = config.to_json()
    back = type(config).from_json(text)
    assert back == config
    assert hash(back) == hash(config)
    assert back.to_json() == text


def test_json_that_is_no_configuration_is_refused():
    fields = json.loads(TINY.to_json())
    for text, message in [
        (
            json.dumps({**fields, "heads": 3, "a": 1}),
            "unknown fields ['a', 'heads'], expected those",
        ),
        ("{}", "fields ['vocab_size'] are missing from the TransformerConfig"),
        ("[1]", "the configuration is [1], expected a JSON object"),
        (json.dumps({**fields, "d_model": "16"}), "d_model is '16', expected an int"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            TransformerConfig.from_json(text)
    assert TransformerConfig.from_json('{"vocab_size": 5}') == TransformerConfig(5)


def models() -> list:
    rich = {"positions": "relative", "norm": "rms", "num_kv_heads": 2, "window": 3, "bias": False}
    return [
        CausalLM(TINY),
        CausalLM(dataclasses.replace(TINY, tie_embeddings=True, **rich)),
        Classifier(dataclasses.replace(TINY, num_classes=3, pooling="attention")),
        Seq2SeqTransformer(PAIR),
        Seq2SeqTransformer(dataclasses.replace(PAIR, **rich)),
    ]


def answers(model) -> torch.Tensor:
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    return model(tokens, tokens) if isinstance(model, Seq2SeqTransformer) else model(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_model_is_saved_and_loaded(tmp_path, dtype):
    for place, model in enumerate(models()):
        folder = tmp_path / str(place)
        model.to(dtype).eval().save_pretrained(folder)
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
        loaded = type(model).from_pretrained(folder)
        assert loaded.config == model.config
        assert not loaded.training
        out = answers(loaded)
        assert out.dtype == dtype
        assert torch.equal(out, answers(model))


def test_another_model_and_other_weights_are_refused(tmp_path):
    CausalLM(TINY).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a CausalLM, expected a Classifier"):
        Classifier.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "flash": True}))
    with pytest.raises(
        ValueError, match=r"unknown fields \['flash'\], expected those of Transformer"
    ):
        CausalLM.from_pretrained(tmp_path)
    path.write_text(json.dumps({**fields, "num_layers": 1}))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layers\.1"):
        CausalLM.from_pretrained(tmp_path)


def test_files_without_the_models_name_are_still_read(tmp_path):
    """As they were written when there was one model."""
    model = Seq2SeqTransformer(PAIR).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    old = (
        "src_vocab",
        "tgt_vocab",
        "d_model",
        "num_heads",
        "num_encoder_layers",
        "d_ff",
        "dropout",
    )
    old += ("num_decoder_layers", "max_length", "norm_first", "positions", "pad_id")
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({name: fields[name] for name in old}))
    assert torch.equal(answers(Seq2SeqTransformer.from_pretrained(tmp_path)), answers(model))
