"""Classifier: padding never matters, and pooling is what its name says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from attnkit.models import Classifier, TransformerConfig

PAD = 0
TINY = TransformerConfig(13, 16, 2, 2, 24, num_classes=3, dropout=0.0, max_length=20)
POOLINGS = ("first", "mean", "attention")
KINDS = {
    "sinusoidal": {},
    "learned": {"positions": "learned", "norm": "rms"},
    "rope": {"positions": "rope", "num_kv_heads": 1, "bias": False},
    "alibi": {"positions": "alibi", "norm_first": True},
    "relative": {"positions": "relative"},
    "window": {"positions": "rope", "window": (2, None)},
}
every_kind = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())


def model_of(**changes) -> Classifier:
    torch.manual_seed(0)
    model = Classifier(dataclasses.replace(TINY, **changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def rows_of(*lengths: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, TINY.vocab_size, (n,), generator=g) for n in lengths]


def padded(rows, side: str, width: int) -> torch.Tensor:
    sides = {"left": lambda n: (n, 0), "right": lambda n: (0, n), "both": lambda n: (1, n - 1)}
    return torch.stack([F.pad(r, sides[side](width - len(r)), value=PAD) for r in rows])


@every_kind
@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_and_the_batch_change_nothing(changes, pooling):
    model, rows = model_of(pooling=pooling, **changes), rows_of(6, 1, 4)
    want = torch.cat([model(row[None]) for row in rows])
    assert want.shape == (3, 3)
    for side in ("left", "right", "both"):
        got = model(padded(rows, side, 9))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_adds_nothing_to_the_gradient(pooling):
    model, rows = model_of(pooling=pooling).double(), rows_of(5, 3)
    grads = []
    for width in (5, 9):
        loss = F.cross_entropy(model(padded(rows, "right", width)), torch.tensor([0, 2]))
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for (name, _), one, other in zip(model.named_parameters(), *grads, strict=True):
        assert one.any(), name
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10, msg=name)


def test_pooling_is_what_its_name_says():
    (row,) = rows_of(6)
    for pooling in POOLINGS:
        model, caught = model_of(pooling=pooling), {}
        model.norm.register_forward_hook(lambda m, a, out, c=caught: c.update(x=out[0]))
        got, x = model(row[None])[0], None
        x = caught["x"]
        if pooling == "first":
            vector = x[0]
        elif pooling == "mean":
            vector = x.mean(0)
        else:
            twin = torch.nn.MultiheadAttention(16, 2)
            twin.load_state_dict(model.pool.state_dict())
            vector = twin(model.query[None], x, x)[0][0]
        torch.testing.assert_close(got, model.output(vector), rtol=1e-5, atol=1e-5)


def test_every_token_counts_for_every_other():
    """An encoder looks both ways, and as far as its windows together reach."""
    assert model_of(positions="relative").positions.bidirectional
    (row,) = rows_of(8)
    for changes, reach in (({}, 7), ({"window": 2}, 2), ({"window": (3, 1)}, 2)):
        model = model_of(pooling="first", **changes)
        for place in range(8):
            changed = row.clone()
            changed[place] = 3 + (row[place] - 3 + 1) % 10
            same = torch.equal(model(changed[None]), model(row[None]))
            assert same == (place > reach), (changes, place)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_alone_gives_numbers(pooling, backend):
    model, rows = model_of(pooling=pooling), rows_of(4, 0)
    tokens = padded(rows, "right", 4)
    out = model(tokens)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(out[:1], model(tokens[:1]), rtol=1e-5, atol=1e-5)


def test_without_padding_every_token_is_read():
    model, tokens = model_of(pad_id=None), torch.zeros(1, 4, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 2] = 1
    assert not torch.allclose(model(tokens), model(changed))


def test_compiles_to_one_graph_in_training():
    torch._dynamo.reset()
    model, counter = model_of(num_layers=1, pooling="attention"), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    tokens = padded(rows_of(4, 2), "right", 5)
    out = compiled(tokens)
    out.sum().backward()
    torch.testing.assert_close(out, model(tokens), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_names_of_parameters_are_stable():
    names = [n for n in model_of(pooling="attention").state_dict() if not n.startswith("layers.")]
    assert sorted(names) == [
        "embedding.weight",
        "norm.bias",
        "norm.weight",
        "output.bias",
        "output.weight",
        "pool.in_proj_bias",
        "pool.in_proj_weight",
        "pool.out_proj.bias",
        "pool.out_proj.weight",
        "query",
    ]


def test_what_is_wrong_is_named():
    model = model_of()
    with pytest.raises(ValueError, match="tokens has 0 tokens, expected 1 or more"):
        model(torch.zeros(2, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="tokens has 21 tokens, expected at most 20"):
        model(torch.ones(2, 21, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_classes is None, expected an int for a Classifier"):
        Classifier(dataclasses.replace(TINY, num_classes=None))
