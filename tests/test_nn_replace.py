"""replace_modules, and what attnkit.nn's modules share with torch.nn's beyond their numbers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import attnkit.nn as ours
from attnkit.nn import replace_modules

CLASSES = (
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerEncoder",
    "TransformerDecoderLayer",
    "TransformerDecoder",
    "Transformer",
)

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


class Model(nn.Module):
    """Attention in several places, one of them twice."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.again = self.attention
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        y, _ = self.attention(x, x, x, need_weights=False)
        z, _ = self.again(y, x, x)
        return self.transformer(x, z)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_becomes_attnkits_in_place(training, ran):
    model = Model().train(training)
    x = torch.randn(2, 5, 8)
    want, parameters = model(x), list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert ran == []
    names = replace_modules(model)
    assert names == [
        "attention",
        "transformer",
        "transformer.encoder",
        "transformer.encoder.layers.0",
        "transformer.encoder.layers.0.self_attn",
        "transformer.decoder",
        "transformer.decoder.layers.0",
        "transformer.decoder.layers.0.self_attn",
        "transformer.decoder.layers.0.multihead_attn",
    ]
    got = model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(ran) == 5
    assert model.again is model.attention
    for name in names:
        assert type(model.get_submodule(name)).__module__.startswith("attnkit.nn")
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    got.sum().backward()
    optimizer.step()
    assert (model(x) - got).abs().max() > 1e-4
    assert replace_modules(model) == []


def test_the_model_itself():
    model = nn.MultiheadAttention(8, 2)
    assert replace_modules(model) == [""]
    assert type(model) is ours.MultiheadAttention


def test_hooks_stay():
    model = Model()
    seen = []
    model.attention.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    replace_modules(model)
    model(torch.randn(1, 3, 8))
    assert seen == [ours.MultiheadAttention] * 2


def test_classes_of_others_are_left_alone():
    class Own(nn.MultiheadAttention):
        def forward(self, query, key, value, **options):
            return query, None

    class OwnLayer(nn.TransformerEncoderLayer):
        pass

    model = nn.ModuleList([Own(8, 2), OwnLayer(8, 2)])
    assert replace_modules(model) == ["1.self_attn"]
    assert type(model[0]) is Own
    assert type(model[1]) is OwnLayer
    x = torch.randn(4, 2, 8)
    model[1].eval()
    torch.testing.assert_close(model[1](x), model[1](x.detach().requires_grad_()))


def test_parametrizations_stay():
    model = Model()
    parametrizations.weight_norm(model.attention, "in_proj_weight")
    parametrizations.orthogonal(model.transformer.encoder.layers[0].linear1)
    other = copy.deepcopy(model)
    x = torch.randn(2, 5, 8)
    want = model(x)
    assert "attention" in replace_modules(model)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    assert isinstance(model.attention, ours.MultiheadAttention)
    assert not isinstance(other.attention, ours.MultiheadAttention)  # a copy has its own life
    assert parametrize.is_parametrized(model.attention, "in_proj_weight")
    model(x).sum().backward()
    assert model.attention.parametrizations.in_proj_weight.original0.grad.abs().max() > 0
    parametrize.remove_parametrizations(model.attention, "in_proj_weight")
    assert type(model.attention) is ours.MultiheadAttention
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------- what torch's modules can


def build(library, name, **options):
    kwargs = {"batch_first": True, **options}
    if name == "MultiheadAttention":
        return library.MultiheadAttention(8, 2, **kwargs)
    if name == "Transformer":
        return library.Transformer(8, 2, 1, 1, 16, dropout=0.0, **kwargs)
    part = name.removeprefix("Transformer").removesuffix("Layer")
    layer = getattr(library, f"Transformer{part}Layer")(8, 2, 16, 0.0, **kwargs)
    return layer if name.endswith("Layer") else getattr(library, name)(layer, 2)


def call(module, x):
    kind = type(module).__name__.removeprefix("Parametrized")
    if kind == "MultiheadAttention":
        return module(x, x, x)[0]
    return module(x) if "Encoder" in kind else module(x, x)


@pytest.mark.parametrize("name", CLASSES)
def test_meta_device(name):
    module = build(ours, name, device="meta")
    assert all(p.is_meta for p in module.parameters())
    out = call(module, torch.empty(2, 5, 8, device="meta"))
    assert (out.shape, out.is_meta) == ((2, 5, 8), True)
    real = build(nn, name)
    module = module.to_empty(device="cpu")
    module.load_state_dict(real.state_dict())
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(call(module.train(), x), call(real.train(), x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_parametrized(name):
    made = []
    for library in (ours, nn):
        torch.manual_seed(0)
        module = build(library, name)
        for inner in list(module.modules()):
            if isinstance(inner, nn.MultiheadAttention):
                parametrizations.weight_norm(inner, "in_proj_weight")
        made.append(module)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(call(made[0], x), call(made[1], x), rtol=1e-4, atol=1e-5)
    again = copy.deepcopy(made[0])
    torch.testing.assert_close(call(again, x), call(made[0], x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CLASSES)
def test_cast_copied_pickled(name, dtype):
    module = build(ours, name).eval()
    x = torch.randn(2, 5, 8)
    want = call(module, x)
    cast = copy.deepcopy(module).to(dtype)
    out = call(cast, x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), want, rtol=0.1, atol=0.05)
    again = pickle.loads(pickle.dumps(cast))
    assert torch.equal(call(again, x.to(dtype)), out)
    file = io.BytesIO()
    torch.save(cast, file)
    file.seek(0)
    assert torch.equal(call(torch.load(file, weights_only=False), x.to(dtype)), out)


@pytest.mark.parametrize("activation", ["relu", "gelu", F.gelu, nn.SiLU(), lambda x: x * x])
@pytest.mark.parametrize("name", [n for n in CLASSES if n.startswith("Transformer")])
def test_custom_activations(name, activation):
    made = []
    for library in (ours, nn):
        torch.manual_seed(0)
        made.append(build(library, name, activation=activation))
    x = torch.randn(2, 5, 8)
    for train in (True, False):
        with torch.no_grad():
            got, want = (call(module.train(train), x) for module in made)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask_check", [True, False])
def test_mask_check_is_kept(mask_check):
    layer = ours.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder = ours.TransformerEncoder(layer, 2, enable_nested_tensor=True, mask_check=mask_check)
    assert encoder.mask_check is mask_check
    hidden = torch.tensor([[True, False, False], [False, False, True]])  # no nested tensor has this
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        got = encoder.eval()(x, src_key_padding_mask=hidden)
        alone = encoder(x[:1, 1:])
    torch.testing.assert_close(got[:1, 1:], alone, rtol=1e-4, atol=1e-5)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model is int 3, expected a torch\.nn\.Module"):
        replace_modules(3)
