"""attnkit.nn.MultiheadAttention beside torch.nn.MultiheadAttention: the same numbers, or better."""

import copy
import inspect
import io
import itertools
import pickle

import pytest
import torch
from torch import nn

from attnkit.nn import MultiheadAttention

E, H, N, L, S = 8, 2, 3, 5, 6
F64 = {"dtype": torch.float64}
NEG = float("-inf")

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")


def pair(**kwargs):
    """Ours and torch's, with the same parameters, none of them zero."""
    kwargs = {"embed_dim": E, "num_heads": H, **F64, **kwargs}
    ours, theirs = MultiheadAttention(**kwargs), nn.MultiheadAttention(**kwargs)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def dense_mask(kind, rows, keys, batch=N):
    """A mask that hides keys, but never the first one."""
    hidden = torch.rand(batch * H, rows, keys) < 0.4
    hidden[..., 0] = False
    match kind:
        case "none":
            return None
        case "bool":
            return hidden[0]
        case "bool per head":
            return hidden
        case "float":
            return torch.randn(rows, keys, **F64).masked_fill(hidden[0], NEG)
        case "float per head":
            return torch.randn(batch * H, rows, keys, **F64).masked_fill(hidden, NEG)
        case "causal":
            return torch.full((rows, keys), NEG, **F64).triu(1)
    raise ValueError(kind)


def padding_mask(kind, keys, batch=N):
    hidden = torch.arange(keys) >= torch.randint(1, keys + 1, (batch, 1))
    match kind:
        case "none":
            return None
        case "bool":
            return hidden
        case "float":
            return torch.randn(batch, keys, **F64).masked_fill(hidden, NEG)
    raise ValueError(kind)


def same(got, want, **tolerance):
    tolerance = {"atol": 1e-12, "rtol": 1e-10, **tolerance}
    if want is None:
        assert got is None
    else:
        torch.testing.assert_close(got, want, **tolerance)


MASKS = ("none", "bool", "bool per head", "float", "float per head", "causal")


@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_equal_to_torch(batch_first, bias, mask, padding):
    torch.manual_seed(0)
    ours, theirs = pair(bias=bias, batch_first=batch_first)
    for inputs in ("self", "memory", "three"):
        keys = L if inputs == "self" or mask == "causal" else S
        shape = (N, L, E) if batch_first else (L, N, E)
        key_shape = (N, keys, E) if batch_first else (keys, N, E)
        q = torch.randn(shape, **F64)
        k = q if inputs == "self" else torch.randn(key_shape, **F64)
        v = torch.randn(key_shape, **F64) if inputs == "three" else k
        masks = {
            "attn_mask": dense_mask(mask, L, keys),
            "key_padding_mask": padding_mask(padding, keys),
            "is_causal": mask == "causal",
        }
        for train, grad, weights in itertools.product(
            (True, False), (True, False), (None, True, False)
        ):
            more = {"need_weights": weights is not None, "average_attn_weights": bool(weights)}
            with torch.set_grad_enabled(grad):
                got = ours.train(train)(q, k, v, **masks, **more)
                want = theirs.train(train)(q, k, v, **masks, **more)
            same(got[0], want[0])
            same(got[1], want[1])


VARIANTS = (
    {},
    {"batch_first": True},
    {"bias": False},
    {"add_bias_kv": True, "batch_first": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("kwargs", "inputs"),
    [
        *itertools.product(VARIANTS, ("self", "memory", "three")),
        ({"kdim": 6, "vdim": 10}, "three"),
        ({"kdim": 6, "vdim": 6, "add_bias_kv": True}, "memory"),
        ({"vdim": 10, "bias": False, "batch_first": True}, "three"),
    ],
    ids=str,
)
def test_gradients_equal_to_torch(kwargs, inputs, need_weights):
    torch.manual_seed(1)
    modules = pair(**kwargs)
    widths = (E, kwargs.get("kdim", E), kwargs.get("vdim", E))
    keys = L if inputs == "self" else S
    lengths = (L, keys, keys)
    leaves = [torch.randn(n, N, w, **F64) for n, w in zip(lengths, widths, strict=True)]
    leaves = leaves[: {"self": 1, "memory": 2, "three": 3}[inputs]]
    bias = torch.randn(L, keys, **F64)
    hidden = padding_mask("bool", keys)
    weigh = torch.randn(L, N, E, **F64)
    results = []
    for module in modules:
        tensors = [x.clone().requires_grad_() for x in leaves]
        added = bias.clone().requires_grad_()
        x = [t.transpose(0, 1) if module.batch_first else t for t in tensors]
        out, weights = module(
            x[0], x[min(1, len(x) - 1)], x[-1], hidden, need_weights=need_weights, attn_mask=added
        )
        loss = ((out.transpose(0, 1) if module.batch_first else out) * weigh).sum()
        if need_weights:
            loss = loss + (weights**2).sum()
        wanted = [*tensors, added, *module.parameters()]
        results.append((out, weights, *torch.autograd.grad(loss, wanted)))
    for got, want in zip(*results, strict=True):
        same(got, want)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_unbatched(per_head, need_weights):
    torch.manual_seed(2)
    for batch_first in (True, False):
        ours, theirs = pair(batch_first=batch_first)
        q, k = torch.randn(L, E, **F64), torch.randn(S, E, **F64)
        mask = dense_mask("float per head" if per_head else "bool", L, S, batch=1)
        hidden = torch.tensor([False, False, True, False, True, True])
        arguments = (q, k, k, hidden, need_weights, mask)
        for average in (True, False):
            got, want = (m(*arguments, average_attn_weights=average) for m in (ours, theirs))
            same(got[0], want[0])
            same(got[1], want[1])
            assert not need_weights or got[1].shape == ((L, S) if average else (H, L, S))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_appended_keys_are_visible_to_every_query(mask, need_weights):
    torch.manual_seed(3)
    x = torch.randn(N, L, E, **F64)
    for bias_kv, zero, padding in itertools.product((True, False), (True, False), ("none", "bool")):
        ours, theirs = pair(add_bias_kv=bias_kv, add_zero_attn=zero, batch_first=True)
        masks = {"attn_mask": dense_mask(mask, L, L), "key_padding_mask": padding_mask(padding, L)}
        # no hint for torch: it would hide the appended keys where no weights are wanted
        want = theirs(x, x, x, need_weights=need_weights, **masks)
        got = ours(x, x, x, need_weights=need_weights, is_causal=mask == "causal", **masks)
        same(got[0], want[0])
        same(got[1], want[1])


@pytest.mark.parametrize(
    "kwargs", [{}, {"kdim": 6}, {"add_bias_kv": True}, {"bias": False}], ids=str
)
def test_same_seed_same_initial_values(kwargs):
    states = []
    for cls in (MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(4)
        states.append(cls(E, H, **kwargs).state_dict())
    ours, theirs = states
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_signatures_are_torchs():
    for name in ("__init__", "forward"):
        ours, theirs = (
            [(p.name, p.default) for p in inspect.signature(getattr(c, name)).parameters.values()]
            for c in (MultiheadAttention, nn.MultiheadAttention)
        )
        assert ours == theirs
    assert isinstance(MultiheadAttention(E, H), nn.MultiheadAttention)
    assert repr(MultiheadAttention(E, H)) == repr(nn.MultiheadAttention(E, H))


def test_never_on_torchs_kernels(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("torch's own attention was called")

    for owner, name in (
        (torch, "_native_multi_head_attention"),
        (nn.functional, "multi_head_attention_forward"),
        (nn.functional, "scaled_dot_product_attention"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    module = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    hidden = padding_mask("bool", L)
    for train, grad, need in itertools.product((True, False), repeat=3):
        with torch.set_grad_enabled(grad):
            out, _ = module.train(train)(x, x, x, hidden, need)
        assert out.shape == (N, L, E)


class TestRowsWithoutKeys:
    """Queries whose every key is hidden: with weights, and always in eval, torch gives NaN."""

    @pytest.mark.parametrize("train", [True, False])
    @pytest.mark.parametrize("need_weights", [True, False])
    def test_padding_hides_a_whole_sequence(self, need_weights, train):
        torch.manual_seed(5)
        module = pair(batch_first=True)[0].train(train)
        x = torch.randn(N, L, E, requires_grad=True, **F64)
        hidden = torch.zeros(N, L, dtype=torch.bool)
        hidden[1] = True
        for mask in (hidden, torch.zeros(N, L, **F64).masked_fill(hidden, NEG)):
            out, weights = module(x, x, x, mask, need_weights, average_attn_weights=False)
            same(out[1], module.out_proj.bias.expand(L, E))
            rest = module(x[[0, 2]], x[[0, 2]], x[[0, 2]], need_weights=need_weights)[0]
            same(out[[0, 2]], rest)
            if need_weights:
                assert not weights[1].any()
            (grad,) = torch.autograd.grad(out.square().sum(), x)
            assert not grad[1].any()
            assert grad.isfinite().all()

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_band_and_padding_together(self, need_weights):
        # query 3 may see keys 2 and 3 alone, and both are padding
        torch.manual_seed(6)
        ours, theirs = pair()
        x = torch.randn(4, 1, E, **F64)
        band = torch.ones(4, 4, dtype=torch.bool).triu(1) | torch.ones(4, 4, dtype=bool).tril(-2)
        hidden = torch.tensor([[False, False, True, True]])
        out, weights = ours(x, x, x, hidden, need_weights, band)
        want, want_weights = theirs(x[:3], x[:3], x[:3], hidden[:, :3], need_weights, band[:3, :3])
        same(out[:3], want)
        same(out[3, 0], ours.out_proj.bias)
        if need_weights:
            same(weights[:, :3, :3], want_weights)
            assert not weights[:, 3].any()
        grads = torch.autograd.grad(out.square().sum(), list(ours.parameters()))
        assert all(g.isfinite().all() for g in grads)

    def test_no_keys_and_no_queries(self):
        module = pair(batch_first=True)[0]
        q, none = torch.randn(N, L, E, **F64), torch.randn(N, 0, E, **F64)
        out, weights = module(q, none, none)
        same(out, module.out_proj.bias.expand(N, L, E))
        assert weights.shape == (N, L, 0)
        out, weights = module(none, q, q)
        assert (out.shape, weights.shape) == ((N, 0, E), (N, 0, L))


class TestDropout:
    def test_output_is_that_of_the_returned_weights(self):
        torch.manual_seed(7)
        module = pair(dropout=0.5, batch_first=True)[0]
        x = torch.randn(N, 17, E, **F64)
        hidden = padding_mask("bool", 17)
        out, weights = module(x, x, x, hidden, average_attn_weights=False)
        _, _, values = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(
            3, -1
        )
        heads = weights @ values.unflatten(-1, (H, -1)).transpose(1, 2)
        same(out, module.out_proj(heads.transpose(1, 2).flatten(2)))
        visible = ~hidden[:, None, None].expand_as(weights)
        dropped = (weights[visible] == 0).double().mean()
        assert 0.4 < dropped < 0.6
        assert not weights[~visible].any()
        assert weights.requires_grad

    def test_the_generator_decides(self):
        module = pair(dropout=0.5)[0]
        x = torch.randn(9, N, E, **F64)

        def run(seed, **kwargs):
            torch.manual_seed(seed)
            return module(x, x, x, **kwargs)[0]

        assert torch.equal(run(1), run(1))
        assert not torch.equal(run(1), run(2))
        same(run(1), run(1, need_weights=False))
        module.eval()
        assert torch.equal(run(1), run(2))

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_everything_dropped(self, need_weights):
        module = pair(dropout=1.0)[0]
        x = torch.randn(L, N, E, **F64)
        same(module(x, x, x, need_weights=need_weights)[0], module.out_proj.bias.expand(L, N, E))


class TestCausalHint:
    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("dropout", [0.0, 0.4])
    def test_a_prefix_does_not_see_what_follows(self, dropout, need_weights):
        mask = torch.full((L, L), NEG, **F64).triu(1)
        x = torch.randn(N, L, E, **F64)
        y = torch.cat([x[:, :2], x[:, 2:] + 3], dim=1)
        for padding, train, extra in itertools.product(
            (None, "bool", "float"), *[(True, False)] * 2
        ):
            module = pair(dropout=dropout, batch_first=True, add_zero_attn=extra)[0].train(train)
            hidden = None if padding is None else padding_mask(padding, L)
            outs = []
            for inputs in (x, y):
                torch.manual_seed(8)
                out, _ = module(
                    inputs, inputs, inputs, hidden, need_weights, attn_mask=mask, is_causal=True
                )
                outs.append(out)
            assert torch.equal(outs[0][:, :2], outs[1][:, :2])
            assert not torch.equal(outs[0][:, 2:], outs[1][:, 2:])

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("extra", [True, False])
    def test_a_promise_is_kept_even_when_the_mask_breaks_it(self, extra, need_weights):
        module = pair(add_zero_attn=extra)[0]
        x = torch.randn(L, N, E, **F64)
        causal = torch.full((L, L), NEG, **F64).triu(1)
        outs = [
            module(x, x, x, need_weights=need_weights, attn_mask=mask, is_causal=True)[0]
            for mask in (causal, torch.zeros(L, L, **F64))
        ]
        same(*outs)

    def test_a_learned_mask_keeps_its_gradient(self):
        module = pair()[0]
        x = torch.randn(L, N, E, **F64)
        mask = torch.randn(L, L, **F64).masked_fill(torch.ones(L, L).triu(1) > 0, NEG)
        grads = []
        for hint in (True, False):
            leaf = mask.clone().requires_grad_()
            out, _ = module(x, x, x, need_weights=False, attn_mask=leaf, is_causal=hint)
            grads.append(torch.autograd.grad(out.square().sum(), leaf)[0])
        assert grads[0].any()
        same(*grads)

    def test_needs_a_mask(self):
        x = torch.randn(L, N, E)
        for need in (True, False):
            with pytest.raises(
                RuntimeError, match="Need attn_mask if specifying the is_causal hint"
            ):
                MultiheadAttention(E, H)(x, x, x, need_weights=need, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [True, False])
def test_lower_precision_is_as_near_to_float64_as_torchs(dtype, need_weights):
    torch.manual_seed(9)
    _, theirs = pair(batch_first=True)
    x = torch.randn(4, 33, E, **F64)
    hidden = padding_mask("bool", 33, batch=4)
    # rounded first, so that the truth is of the same numbers
    theirs.to(dtype).double()
    x = x.to(dtype).double()
    truth = theirs(x, x, x, hidden, need_weights)
    ours = MultiheadAttention(E, H, batch_first=True, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    theirs, x = theirs.to(dtype), x.to(dtype)
    got, naive = (m(x, x, x, hidden, need_weights) for m in (ours, theirs))
    for mine, other, true in zip(got, naive, truth, strict=True):
        if true is None:
            continue
        assert mine.dtype == dtype
        error, allowed = ((y.double() - true).abs().max() for y in (mine, other))
        noise = torch.finfo(dtype).eps * true.abs().max()
        assert error <= 2 * allowed + noise


def test_half_precision_scores_do_not_overflow():
    module = MultiheadAttention(12, 2, dtype=torch.float16)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(12).repeat(3, 1))
    x = torch.randn(7, 1, 12, dtype=torch.float16) + 200
    for need in (True, False):
        assert module(x, x, x, need_weights=need)[0].isfinite().all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast(need_weights):
    torch.manual_seed(10)
    module = pair(batch_first=True, add_bias_kv=True)[0].float()
    x = torch.randn(N, L, E)
    hidden = padding_mask("bool", L)
    want, _ = module(x, x, x, hidden, need_weights)
    for train, grad in itertools.product((True, False), repeat=2):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
            out, _ = module.train(train)(x, x, x, hidden, need_weights)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), want, atol=0.05, rtol=0.05)


def test_copies_and_files():
    torch.manual_seed(11)
    for kwargs in ({}, {"kdim": 6, "vdim": 10}, {"bias": False}, {"add_bias_kv": True}):
        ours, theirs = pair(**kwargs)
        theirs.load_state_dict(ours.state_dict())
        q = torch.randn(L, N, E, **F64)
        k = torch.randn(S, N, kwargs.get("kdim", E), **F64)
        v = torch.randn(S, N, kwargs.get("vdim", E), **F64)
        want = theirs(q, k, v)[0]
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        for module in (
            copy.deepcopy(ours),
            pickle.loads(pickle.dumps(ours)),
            torch.load(file, weights_only=False),
        ):
            assert type(module) is MultiheadAttention
            same(module(q, k, v)[0], want)


def test_state_of_the_first_versions_lacks_an_attribute():
    state = MultiheadAttention(E, H).__getstate__()
    del state["_qkv_same_embed_dim"]
    module = MultiheadAttention.__new__(MultiheadAttention)
    module.__setstate__(state)
    x = torch.randn(L, N, E)
    assert module(x, x, x)[0].shape == x.shape


def test_hooks_run_in_every_mode():
    module = MultiheadAttention(E, H, batch_first=True)
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.out_proj.register_forward_hook(lambda *_: seen.append("out_proj"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    x = torch.randn(N, L, E)
    for train, grad in itertools.product((True, False), repeat=2):
        seen.clear()
        with torch.set_grad_enabled(grad):
            module.train(train)(x, x, x)
        assert seen == ["before", "out_proj", "after"]


@pytest.mark.parametrize("need_weights", [True, False])
def test_compiles_to_one_graph(need_weights):
    torch.manual_seed(12)
    module = pair(batch_first=True)[0].float()
    mask = torch.full((L, L), NEG).triu(1)
    hidden = padding_mask("bool", L)

    def run(x):
        out, weights = module(
            x, x, x, hidden, need_weights=need_weights, attn_mask=mask, is_causal=True
        )
        return out if weights is None else (out, weights)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    x = torch.randn(N, L, E)
    grads = []
    for function in (run, compiled):
        out = function(x)
        outs = out if need_weights else (out,)
        loss = sum(y.square().sum() for y in outs)
        grads.append((*outs, *torch.autograd.grad(loss, list(module.parameters()))))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_per_sample():
    torch.manual_seed(14)
    module = pair(batch_first=True)[0]
    x = torch.randn(N, L, E, **F64)
    hidden = torch.arange(L) >= torch.tensor([[L], [2], [0]])
    parameters = dict(module.named_parameters())

    def loss(parameters, x, hidden):
        inputs = (x[None], x[None], x[None], hidden[None])
        out, weights = torch.func.functional_call(module, parameters, inputs)
        return out.square().sum() + weights.square().sum()

    per_sample = torch.func.grad(loss)
    got = torch.func.vmap(per_sample, (None, 0, 0))(parameters, x, hidden)
    for i in range(N):
        for name, want in per_sample(parameters, x[i], hidden[i]).items():
            same(got[name][i], want)


@pytest.mark.parametrize("need_weights", [True, False])
def test_second_derivatives(need_weights):
    torch.manual_seed(15)
    module = pair(batch_first=True)[0]
    x = torch.randn(2, 3, E, **F64, requires_grad=True)
    hidden = torch.tensor([[False, False, True], [True, True, True]])

    def run(x):
        out, weights = module(x, x, x, hidden, need_weights)
        return out if weights is None else (out, weights)

    assert torch.autograd.gradgradcheck(run, (x,), atol=1e-6, fast_mode=True)


def bad(x, **kwargs):
    return {"query": x, "key": x, "value": x, **kwargs}


X = torch.randn(N, L, E)
WRONG_CALLS = {
    "query 4-D": (bad(X[None]), AssertionError, "query should be unbatched 2D or batched 3D.*4-D"),
    "key unbatched": (bad(X, key=X[0]), AssertionError, "key is 2-D, expected 3-D"),
    "value unbatched": (bad(X, value=X[0]), AssertionError, "value is 2-D, expected 3-D"),
    "query width": (bad(X[..., :6]), AssertionError, "embedding dimension of 8 for query, found 6"),
    "key width": (bad(X, key=X[..., :6]), AssertionError, "dimension of 8 for key, found 6"),
    "value length": (
        bad(X, value=X[:, :4]),
        AssertionError,
        r"key has .*\(3, 5\).*value.*\(3, 4\)",
    ),
    "batch": (bad(X, query=X[:2]), RuntimeError, "key has batch size 3, query has 2"),
    "integer mask": (
        bad(X, attn_mask=torch.zeros(L, L, dtype=torch.long)),
        AssertionError,
        "only bool and floating types of attn_mask are supported, found torch.int64",
    ),
    "integer padding": (
        bad(X, key_padding_mask=torch.zeros(N, L, dtype=torch.uint8)),
        AssertionError,
        "only bool and floating types of key_padding_mask are supported, found torch.uint8",
    ),
    "2-D mask shape": (
        bad(X, attn_mask=torch.zeros(L, 6)),
        RuntimeError,
        r"The shape of the 2D attn_mask is torch.Size\(\[5, 6\]\), but should be \(5, 5\)\.",
    ),
    "3-D mask shape": (
        bad(X, attn_mask=torch.zeros(N, L, L)),
        RuntimeError,
        r"The shape of the 3D attn_mask is torch.Size\(\[3, 5, 5\]\), but should be \(6, 5, 5\)\.",
    ),
    "unbatched 3-D mask shape": (
        bad(X[0], attn_mask=torch.zeros(1, L, L)),
        AssertionError,
        r"\[1, 5, 5\]\), but should be \(2, 5, 5\)",
    ),
    "mask rank": (bad(X, attn_mask=torch.zeros(1, 1, L, L)), AssertionError, "attn_mask .* 4-D"),
    "padding shape": (
        bad(X, key_padding_mask=torch.zeros(L, N, dtype=torch.bool)),
        AssertionError,
        r"key_padding_mask of shape \(3, 5\) \(batch, keys\), found \(5, 3\)",
    ),
    "padding rank": (
        bad(X, key_padding_mask=torch.zeros(L, dtype=torch.bool)),
        AssertionError,
        r"key_padding_mask of shape \(3, 5\)",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(name):
    arguments, error, message = WRONG_CALLS[name]
    with pytest.raises(error, match=message):
        MultiheadAttention(E, H, batch_first=True)(**arguments)
    # torch refuses them, too, with the same kind of error
    with pytest.raises(error):
        nn.MultiheadAttention(E, H, batch_first=True)(**arguments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])
    with pytest.raises(NotImplementedError, match=r"query is a nested tensor.*key padding mask"):
        MultiheadAttention(E, H, batch_first=True).eval()(nested, nested, nested)


def test_wrong_sizes():
    for embed_dim, num_heads in ((0, 1), (8, 0), (-8, 2)):
        with pytest.raises(ValueError, match="must be greater than 0"):
            MultiheadAttention(embed_dim, num_heads)
    with pytest.raises(AssertionError, match="embed_dim must be divisible by num_heads"):
        MultiheadAttention(8, 3)


def test_every_backend_serves_it(backend, ran):
    torch.manual_seed(13)
    ours, theirs = pair(batch_first=True, dtype=torch.float32)
    x = torch.randn(N, L, E)
    hidden = padding_mask("bool", L)
    mask = torch.full((L, L), NEG).triu(1)
    want = theirs(x, x, x, hidden, attn_mask=mask)
    got = ours(x, x, x, hidden, attn_mask=mask, is_causal=True)
    assert ran == [f"{backend}.forward"]  # once: the weights come from plain operations
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-6, rtol=1e-5)
