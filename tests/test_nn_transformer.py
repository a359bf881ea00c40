"""Encoder, decoder and Transformer of attnkit.nn beside torch.nn's: one set of numbers."""

import copy
import functools
import inspect
import io
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnkit.nn as ours

E, H, D_FF, N, S, T = 8, 2, 12, 3, 6, 5
F64 = {"dtype": torch.float64}
NEG = float("-inf")
CLASSES = (
    "TransformerEncoderLayer",
    "TransformerEncoder",
    "TransformerDecoderLayer",
    "TransformerDecoder",
    "Transformer",
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def build(library, name, *, norm=True, **kwargs):
    """A small module of `name` from attnkit.nn or torch.nn."""
    kwargs = {"dropout": 0.0, **F64, **kwargs}
    if name == "Transformer":
        return library.Transformer(E, H, 2, 2, D_FF, **kwargs)
    part = "Encoder" if "Encoder" in name else "Decoder"
    layer = getattr(library, f"Transformer{part}Layer")(E, H, D_FF, **kwargs)
    if name.endswith("Layer"):
        return layer
    last = nn.LayerNorm(E, bias=kwargs.get("bias", True), **F64) if norm else None
    return getattr(library, f"Transformer{part}")(layer, 2, last)


def pair(name, **kwargs):
    """Ours and torch's, with the same parameters, none of them zero or one."""
    mine, theirs = build(ours, name, **kwargs), build(nn, name, **kwargs)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    mine.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(mine.state_dict(), strict=True)
    return mine, theirs


@functools.cache
def shared_pair(name, batch_first, norm_first, bias):
    """A pair that tests share and leave as it is: copying layers is what takes the time."""
    return pair(name, batch_first=batch_first, norm_first=norm_first, bias=bias)


def attn_mask(kind, rows, keys):
    hidden = torch.rand(rows, keys) < 0.4
    hidden[:, 0] = False
    match kind:
        case "none":
            return None
        case "bool":
            return hidden
        case "float":
            return torch.randn(rows, keys, **F64).masked_fill(hidden, NEG)
        case "per head":
            return torch.rand(N * H, rows, keys) * torch.arange(keys) > 1.5
        case "causal":
            return torch.full((rows, keys), NEG, **F64).triu(1)
        case "causal bool":
            return torch.ones(rows, keys, dtype=torch.bool).triu(1)
    raise ValueError(kind)


def padding_mask(kind, keys):
    if kind == "none":
        return None
    hidden = torch.arange(keys) >= torch.tensor([keys, 2, keys - 1])[:, None]
    return hidden if kind == "bool" else torch.randn(N, keys, **F64).masked_fill(hidden, NEG)


def inputs(name, batch_first, mask, padding):
    """Positional and keyword arguments of a call."""
    src, tgt = torch.randn(N, S, E, **F64), torch.randn(N, T, E, **F64)
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    causal = "causal" in mask
    cross = "bool" if causal else mask
    src_args = {"src_mask": attn_mask(mask, S, S), "src_key_padding_mask": padding_mask(padding, S)}
    tgt_args = {
        "tgt_mask": attn_mask(mask, T, T),
        "memory_mask": attn_mask(cross, T, S),
        "tgt_key_padding_mask": padding_mask(padding, T),
        "memory_key_padding_mask": padding_mask(padding, S),
    }
    match name:
        case "TransformerEncoderLayer":
            return (src,), {**src_args, "is_causal": causal}
        case "TransformerEncoder":
            return (src,), {"mask": src_args.pop("src_mask"), **src_args}
        case "TransformerDecoderLayer":
            return (tgt, src), {**tgt_args, "tgt_is_causal": causal}
        case "TransformerDecoder":
            return (tgt, src), tgt_args
    return (src, tgt), {**src_args, **tgt_args}


def same(got, want, **tolerance):
    torch.testing.assert_close(got, want, **{"atol": 1e-11, "rtol": 1e-9, **tolerance})


@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "per head", "causal", "causal bool"])
@pytest.mark.parametrize("name", CLASSES)
def test_equal_to_torch(name, mask, padding):
    torch.manual_seed(0)
    for batch_first, norm_first, bias in itertools.product((True, False), repeat=3):
        mine, theirs = shared_pair(name, batch_first, norm_first, bias)
        args, masks = inputs(name, batch_first, mask, padding)
        want = theirs.train()(*args, **masks)
        modes = [(True, True), (False, False), (True, False), (False, True)]
        for train, grad in modes if name.endswith("Layer") else modes[:2]:
            with torch.set_grad_enabled(grad):
                got = mine.train(train)(*args, **masks)
            same(got, want)
        if "float" not in (mask, padding):  # torch's fast path takes a float mask for a bool one
            with torch.no_grad():
                want = theirs.eval()(*args, **masks)
            # the fast path's nested tensors leave other numbers at padded positions
            pad = masks.get("src_key_padding_mask")
            if pad is not None and name in ("TransformerEncoder", "TransformerEncoderLayer"):
                pad = pad if batch_first else pad.T
                got, want = got[~pad], want[~pad]
            same(got, want)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("mask", ["float", "causal"])
def test_gradients_equal_to_torch(mask, norm_first, name):
    torch.manual_seed(1)
    for activation, batch_first in (("gelu", True), (torch.tanh, False)):
        modules = pair(name, norm_first=norm_first, activation=activation, batch_first=batch_first)
        args, masks = inputs(name, batch_first, mask, "bool")
        results = []
        for module in modules:
            leaves = [x.clone().requires_grad_() for x in args]
            out = module(*leaves, **masks)
            weigh = torch.linspace(-1, 1, out.numel(), **F64).view(out.shape)
            grads = torch.autograd.grad((out * weigh).sum(), [*leaves, *module.parameters()])
            results.append((out, *grads))
        for got, want in zip(*results, strict=True):
            same(got, want)


@pytest.mark.parametrize("name", CLASSES)
def test_unbatched(name):
    torch.manual_seed(2)
    mine, theirs = pair(name, batch_first=True)
    args, masks = inputs(name, True, "float", "bool")
    args = [x[1] for x in args]
    masks = {key: x[1] if "padding" in key else x for key, x in masks.items()}
    for train in (True, False):
        same(mine.train(train)(*args, **masks), theirs.train(train)(*args, **masks))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("bias", [True, False])
def test_same_seed_same_initial_values(bias, name):
    states = []
    for library in (ours, nn):
        torch.manual_seed(3)
        states.append(build(library, name, bias=bias).state_dict())
    mine, theirs = states
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_and_types_are_torchs(name):
    mine, theirs = getattr(ours, name), getattr(nn, name)
    assert issubclass(mine, theirs)
    for method in ("__init__", "forward"):
        parameters = [
            [(p.name, p.default) for p in inspect.signature(getattr(c, method)).parameters.values()]
            for c in (mine, theirs)
        ]
        assert parameters[0] == parameters[1]
    module = build(ours, name)
    assert repr(module) == repr(build(nn, name))
    attention = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
    assert attention
    assert all(type(m) is ours.MultiheadAttention for m in attention)
    layers = [m for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    assert all(type(m) is ours.TransformerEncoderLayer for m in layers)


@pytest.mark.parametrize("name", CLASSES)
def test_copies_and_files(name):
    torch.manual_seed(4)
    mine, _ = pair(name)
    args, masks = inputs(name, False, "float", "bool")
    want = mine(*args, **masks)
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    for module in (
        copy.deepcopy(mine),
        pickle.loads(pickle.dumps(mine)),
        torch.load(file, weights_only=False),
    ):
        same(module(*args, **masks), want, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CLASSES)
def test_lower_precision(name, dtype):
    torch.manual_seed(5)
    mine, theirs = (module.to(dtype).double() for module in pair(name))
    args, masks = inputs(name, False, "causal", "bool")
    args = [x.to(dtype) for x in args]
    want = theirs(*(x.double() for x in args), **masks)
    low = {k: x.to(dtype) if x is not None and "mask" in k and x.is_floating_point() else x
           for k, x in masks.items() if isinstance(x, torch.Tensor)}  # fmt: skip
    flags = {k: x for k, x in masks.items() if not isinstance(x, torch.Tensor)}
    got, naive = (m.to(dtype)(*args, **low, **flags) for m in (mine, theirs))
    assert got.dtype == dtype
    error, allowed = ((y.double() - want).abs().max() for y in (got, naive))
    assert error <= 2 * allowed + torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("name", CLASSES)
def test_autocast(name):
    torch.manual_seed(6)
    mine = pair(name)[0].float()
    args, masks = inputs(name, False, "bool", "bool")
    args = [x.float() for x in args]
    want = mine(*args, **masks)
    for train, grad in itertools.product((True, False), repeat=2):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
            got = mine.train(train)(*args, **masks)
        torch.testing.assert_close(got.float(), want, atol=0.1, rtol=0.1)


def test_never_on_torchs_kernels(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("torch's own attention was called")

    for owner, name in (
        (torch, "_native_multi_head_attention"),
        (torch, "_transformer_encoder_layer_fwd"),
        (torch, "_nested_tensor_from_mask"),
        (F, "multi_head_attention_forward"),
        (F, "scaled_dot_product_attention"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    module = build(ours, "Transformer", batch_first=True)
    args, masks = inputs("Transformer", True, "none", "bool")
    for train, grad in itertools.product((True, False), repeat=2):
        with torch.set_grad_enabled(grad):
            assert module.train(train)(*args, **masks).shape == args[1].shape


def test_hooks_run_in_every_mode_and_in_order():
    module = build(ours, "Transformer", batch_first=True)
    seen = []
    names = ("self_attn", "self_attn.out_proj", "linear1", "multihead_attn", "dropout2", "norm1")
    for i, layer in enumerate((module.encoder.layers[1], module.decoder.layers[0])):
        for name in names:
            if i == 1 or name != "multihead_attn":
                part = layer.get_submodule(name)
                part.register_forward_hook(lambda *_, key=(i, name): seen.append(key))
    src, tgt = torch.randn(N, S, E, **F64), torch.randn(N, T, E, **F64)
    for train, context in itertools.product(
        (True, False), (torch.enable_grad, torch.no_grad, torch.inference_mode)
    ):
        seen.clear()
        with context():
            module.train(train)(src, tgt)
        encoder = ["self_attn.out_proj", "self_attn", "norm1", "linear1", "dropout2"]
        decoder = [*encoder[:3], "multihead_attn", "dropout2", "linear1"]
        assert seen == [(0, name) for name in encoder] + [(1, name) for name in decoder]


class TestPadding:
    @pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
    def test_length_is_kept_and_real_tokens_are_exact(self, mode):
        torch.manual_seed(7)
        encoder = pair("TransformerEncoder", batch_first=True)[0].train(mode == "train")
        x = torch.randn(N, 8, E, **F64)
        lengths = [5, 3, 1]  # the last three columns are padding everywhere
        hidden = torch.arange(8) >= torch.tensor(lengths)[:, None]
        contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        with contexts.get(mode, torch.enable_grad)():
            out = encoder(x, src_key_padding_mask=hidden)
            alone = [encoder(x[i : i + 1, :n]) for i, n in enumerate(lengths)]
        assert out.shape == x.shape
        assert out.isfinite().all()
        for i, n in enumerate(lengths):
            same(out[i : i + 1, :n], alone[i])

    @pytest.mark.parametrize("train", [True, False])
    @pytest.mark.parametrize("grad", [True, False])
    def test_a_sequence_of_nothing_but_padding(self, grad, train):
        module = pair("Transformer", batch_first=True)[0].train(train)
        src, tgt = torch.randn(N, S, E, **F64), torch.randn(N, T, E, **F64)
        hidden = torch.zeros(N, S, dtype=torch.bool)
        hidden[1] = True
        with torch.set_grad_enabled(grad):
            out = module(src, tgt, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
            rest = module(src[[0, 2]], tgt[[0, 2]])
        assert out.isfinite().all()
        same(out[[0, 2]], rest)
        if grad:
            grads = torch.autograd.grad(out.sum(), list(module.parameters()))
            assert all(g.isfinite().all() for g in grads)


class TestCausal:
    @pytest.mark.parametrize("train", [True, False])
    def test_a_hint_without_a_mask_is_refused(self, train):
        x = torch.randn(S, N, E, **F64)
        for name, args, hint in (
            ("TransformerEncoderLayer", (x,), "is_causal"),
            ("TransformerEncoder", (x,), "is_causal"),
            ("TransformerDecoderLayer", (x, x), "tgt_is_causal"),
            ("TransformerDecoder", (x, x), "tgt_is_causal"),
            ("TransformerDecoder", (x, x), "memory_is_causal"),
            ("Transformer", (x, x), "src_is_causal"),
        ):
            module = build(ours, name).train(train)
            for grad in (True, False):
                with (
                    torch.set_grad_enabled(grad),
                    pytest.raises(RuntimeError, match="Need attn_mask"),
                ):
                    module(*args, **{hint: True})

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bool])
    @pytest.mark.parametrize("part", ["Encoder", "Decoder"])
    def test_a_causal_mask_is_found_by_its_values(self, part, dtype):
        class Layer(nn.Module):
            """Looks at the hint, which has to come by keyword."""

            def __init__(self):
                super().__init__()
                self.self_attn = nn.Identity()
                self.self_attn.batch_first = False
                self.seen = []

            def forward(self, x, *args, is_causal=None, tgt_is_causal=None, **kwargs):
                self.seen.append(is_causal if part == "Encoder" else tgt_is_causal)
                return x

        causal = torch.ones(S, S, dtype=torch.bool).triu(1)
        if dtype != torch.bool:
            causal = torch.zeros(S, S, dtype=dtype).masked_fill(causal, NEG)
        nearly = causal.clone()
        nearly[0, 1] = 0
        cases = [
            (causal, None, True),
            (causal, False, False),
            (causal, True, True),
            (nearly, None, False),
            (nearly, True, True),
            (causal[:, :-1], None, False),
            (causal.expand(N * H, S, S), None, False),
            (None, None, False),
        ]
        if dtype != torch.bool:  # a mask that learns has to be read
            cases.append((causal.clone().requires_grad_(), None, False))
        module = getattr(ours, f"Transformer{part}")(Layer(), 2)
        x = torch.randn(S, N, E, **F64)
        for mask, given, expected in cases:
            if part == "Encoder":
                module(x, mask, is_causal=given)
            else:
                module(x, x, mask, tgt_is_causal=given)
            for layer in module.layers:
                assert layer.seen.pop() is expected

    def test_found_or_told_or_neither_gives_the_same(self):
        torch.manual_seed(8)
        module = pair("TransformerEncoder")[0]
        x = torch.randn(S, N, E, **F64)
        mask = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
        outs = [module(x, mask, is_causal=hint) for hint in (None, True, False)]
        same(outs[0], outs[1])
        same(outs[0], outs[2])
        changed = module(torch.cat([x[:3], x[3:] + 1]), mask)
        assert torch.equal(changed[:3], outs[0][:3])

    def test_the_mask_maker_is_torchs(self):
        mask = ours.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
        same(mask, torch.tensor([[0, NEG, NEG], [0, 0, NEG], [0, 0, 0]], **F64))


class TestSubclasses:
    """Code written for torch's layers gets the additive masks that torch's layers make."""

    def test_a_block_of_its_own(self):
        seen = []

        class Layer(ours.TransformerEncoderLayer):
            def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
                seen.extend((attn_mask, key_padding_mask))
                return super()._sa_block(x, attn_mask, key_padding_mask, is_causal)

        layer = Layer(E, H, D_FF, 0.0, batch_first=True, **F64)
        x = torch.randn(N, S, E, **F64)
        hidden, padding = attn_mask("bool", S, S), padding_mask("bool", S)
        out = ours.TransformerEncoder(layer, 1)(x, hidden, padding)
        for got, mask in zip(seen, (hidden, padding), strict=True):
            same(got, torch.zeros(mask.shape, **F64).masked_fill(mask, NEG))
        plain = ours.TransformerEncoderLayer(E, H, D_FF, 0.0, batch_first=True, **F64)
        plain.load_state_dict(layer.state_dict())
        same(out, plain(x, hidden, padding))

    def test_a_layer_of_its_own(self):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.seen = []

            def forward(self, src, src_mask, src_key_padding_mask, is_causal):
                self.seen.extend((src_mask, src_key_padding_mask, is_causal))
                return src + 1

        encoder = ours.TransformerEncoder(Layer(), 2, enable_nested_tensor=False)
        x = torch.randn(S, N, E, **F64)
        causal, padding = attn_mask("causal bool", S, S), padding_mask("bool", S)
        same(encoder(x, causal, padding), x + 2)
        mask, pad, hint = encoder.layers[0].seen
        same(mask, attn_mask("causal", S, S))
        same(pad, torch.zeros(N, S, **F64).masked_fill(padding, NEG))
        assert hint is True

    def test_torchs_layers_in_our_stack_and_ours_in_torchs(self):
        torch.manual_seed(9)
        mine, theirs = pair("TransformerEncoderLayer")
        x = torch.randn(S, N, E, **F64)
        masks = (attn_mask("bool", S, S), padding_mask("bool", S))
        want = nn.TransformerEncoder(theirs, 2)(x, *masks)
        same(ours.TransformerEncoder(theirs, 2)(x, *masks), want)
        same(nn.TransformerEncoder(mine, 2)(x, *masks), want)

    def test_custom_encoder_and_decoder(self):
        encoder, decoder = build(ours, "TransformerEncoder"), build(nn, "TransformerDecoder")
        module = ours.Transformer(E, H, custom_encoder=encoder, custom_decoder=decoder)
        assert module.encoder is encoder
        assert module.decoder is decoder


def test_enable_nested_tensor_is_kept_and_does_nothing():
    layer = build(ours, "TransformerEncoderLayer", batch_first=True)
    x, padding = torch.randn(N, S, E, **F64), padding_mask("bool", S)
    outs = []
    for enable in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            encoder = ours.TransformerEncoder(layer, 1, enable_nested_tensor=enable).eval()
        assert encoder.enable_nested_tensor is enable
        with torch.no_grad():
            outs.append(encoder(x, src_key_padding_mask=padding))
    assert torch.equal(*outs)


@pytest.mark.parametrize("train", [True, False])
def test_dropout_in_training_only(train):
    x = torch.randn(S, N, E, **F64)
    for name in CLASSES:
        module = build(ours, name, dropout=0.5).train(train)
        args = (x,) if "Encoder" in name else (x, x)
        assert torch.equal(module(*args), module(*args)) is not train
        torch.manual_seed(10)
        first = module(*args)
        torch.manual_seed(10)
        assert torch.equal(first, module(*args))


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder"])
def test_compiles_to_one_graph(name):
    torch.manual_seed(11)
    module = pair(name, batch_first=True)[0]
    module.layers = module.layers[:1]
    args, masks = inputs(name, True, "causal", "bool")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for function in (module, compiled):
        out = function(*args, **masks)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))))
    for got, want in zip(*results, strict=True):
        same(got, want)


Q = torch.randn(N, S, E)
WRONG_CALLS = {
    "encoder mask dtype": (
        "TransformerEncoder", (Q,), {"mask": torch.zeros(S, S, dtype=torch.int)},
        AssertionError, "only bool and floating types of mask are supported, found torch.int32",
    ),
    "encoder padding dtype": (
        "TransformerEncoder", (Q,), {"src_key_padding_mask": torch.zeros(N, S, dtype=torch.int)},
        AssertionError, "types of src_key_padding_mask are supported",
    ),
    "layer mask dtype": (
        "TransformerEncoderLayer", (Q,), {"src_mask": torch.zeros(S, S, dtype=torch.int)},
        AssertionError, "types of src_mask are supported",
    ),
    "layer mask shape": (
        "TransformerEncoderLayer", (Q,), {"src_mask": torch.zeros(S, S + 1)},
        RuntimeError, r"2D attn_mask is torch.Size\(\[6, 7\]\), but should be \(6, 6\)",
    ),
    "decoder mask dtype": (
        "TransformerDecoder", (Q, Q), {"tgt_mask": torch.zeros(S, S, dtype=torch.int)},
        AssertionError, "types of tgt_mask are supported",
    ),
    "decoder batch": (
        "TransformerDecoder", (Q, Q[:2]), {}, RuntimeError, "key has batch size 2, query has 3",
    ),
    "width": ("TransformerEncoder", (Q[..., :6],), {}, AssertionError, "8 for query, found 6"),
    "batches": (
        "Transformer", (Q, Q[:2]), {}, RuntimeError, "batch number of src and tgt must be equal",
    ),
    "features": (
        "Transformer", (Q, Q[..., :6]), {}, RuntimeError, "feature number of src and tgt must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls(case):
    name, args, kwargs, error, message = WRONG_CALLS[case]
    with pytest.raises(error, match=message):
        build(ours, name, batch_first=True, dtype=torch.float32, norm=False)(*args, **kwargs)


def test_unknown_activation():
    with pytest.raises(RuntimeError, match="activation should be relu/gelu, not tanh"):
        ours.TransformerEncoderLayer(E, H, activation="tanh")


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])
    dense = torch.randn(2, S, E)
    for name, args in (
        ("TransformerEncoderLayer", (nested,)),
        ("TransformerEncoder", (nested,)),
        ("TransformerDecoder", (nested, dense)),
        ("TransformerDecoder", (dense, nested)),
    ):
        module = build(ours, name, batch_first=True, dtype=torch.float32, norm=False).eval()
        with torch.no_grad(), pytest.raises(NotImplementedError, match="is a nested tensor"):
            module(*args)


def test_every_backend_serves_it(backend, ran):
    torch.manual_seed(12)
    mine, theirs = (m.float() for m in pair("Transformer", batch_first=True))
    args, masks = inputs("Transformer", True, "causal bool", "bool")
    args = [x.float() for x in args]
    results = []
    for module in (mine, theirs):
        out = module(*args, **masks)
        grads = torch.autograd.grad(out.square().mean(), list(module.parameters()))
        results.append((out, *grads))
    # encoder: 2 layers, decoder: 2 layers of 2
    assert sorted(ran) == [f"{backend}.backward"] * 6 + [f"{backend}.forward"] * 6
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
