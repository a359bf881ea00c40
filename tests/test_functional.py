"""The public functions against the definition in float64, on every backend."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attnkit
from attnkit import _gpu, dispatch, masks
from attnkit.backends import cuda

SDPA = attnkit.scaled_dot_product_attention
NEAR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = NEAR[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def definition(q, k, v, mask=None, scale=None):
    """softmax(scale q k^T + mask) v in float64, with 0 for rows without a key."""
    q, k, v = q.double(), k.double(), v.double()
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.double()
    dead = (s == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0) @ v


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def same_gradients(f, g, *tensors):
    """f and g agree in value and in all gradients; g in float64."""
    a, b = leaves(*tensors), leaves(*(t.double() for t in tensors))
    got, want = f(*a), g(*b)
    near(got, want)
    up = torch.randn(want.shape, dtype=torch.float64)
    mine = torch.autograd.grad(got, a, up.to(got.dtype))
    truth = [torch.zeros_like(t) for t in b]
    if want.requires_grad:
        truth = torch.autograd.grad(want, b, up, materialize_grads=True)
    for x, t, y in zip(mine, a, truth, strict=True):
        assert x.shape == t.shape
        assert x.dtype == t.dtype
        near(x, y)


# ------------------------------------------------------------- leading dimensions, broadcasting

SHAPES = [
    ((5, 8), (7, 8), (7, 8)),
    ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    ((2, 1, 2, 3, 5, 8), (1, 4, 2, 3, 7, 8), (2, 4, 1, 1, 7, 8)),
    ((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 8)),
    ((2, 1, 5, 8), (2, 3, 7, 8), (1, 3, 7, 8)),
    ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    ((3, 5, 8), (2, 3, 7, 8), (7, 8)),
    ((2, 3, 5, 8), (7, 8), (7, 8)),
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_leading_dimensions_broadcast(backend, ran, shapes):
    q, k, v = (torch.randn(s) for s in shapes)
    same_gradients(SDPA, definition, q, k, v)
    assert ran == [f"{backend}.forward", f"{backend}.backward"]


@pytest.mark.parametrize("shapes", [s for s in SHAPES if len(s[0]) > 2])
def test_layouts_and_causal_at_any_rank(backend, shapes):
    q, k, v = (torch.randn(s).mT.contiguous().mT for s in shapes)
    late = torch.ones(5, 7, dtype=torch.bool).tril()
    near(SDPA(q, k, v, is_causal=True), definition(q, k, v, late))


GROUPS = [
    ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    ((2, 6, 5, 8), (2, 1, 7, 8), (2, 3, 7, 4)),
    ((2, 6, 5, 8), (2, 6, 7, 8), (2, 2, 7, 8)),
    ((6, 5, 8), (2, 7, 8), (2, 7, 8)),
    ((3, 2, 6, 5, 8), (3, 2, 2, 7, 8), (3, 2, 2, 7, 8)),
]


@pytest.mark.parametrize("shapes", GROUPS)
def test_grouped_heads(backend, ran, shapes):
    q, k, v = (torch.randn(s) for s in shapes)

    def grouped(q, k, v):
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        return definition(q, k, v)

    same_gradients(lambda *t: SDPA(*t, enable_gqa=True), grouped, q, k, v)
    assert ran == [f"{backend}.forward", f"{backend}.backward"]


def test_output_of_the_kernels_has_the_layout_of_the_query():
    if "cpu" not in attnkit.available_backends():
        pytest.skip(dispatch.status()["cpu"])
    q, k, v = (torch.randn(2, 5, 3, 8).transpose(1, 2) for _ in range(3))
    for out in (SDPA(q, k, v), SDPA(q.detach().requires_grad_(), k, v)):
        assert out.transpose(1, 2).is_contiguous()
    assert SDPA(q.contiguous(), k, v).is_contiguous()
    cu = torch.tensor([0, 4, 10])
    q, k, v = (torch.randn(10, 3, 8) for _ in range(3))
    assert attnkit.varlen_attention(q, k, v, cu, cu).is_contiguous()


# ------------------------------------------------------------- masks

MASKS = [
    (), (7,), (1,), (5, 7), (1, 7), (5, 1), (1, 1), (3, 5, 7), (1, 5, 7), (3, 1, 7), (3, 5, 1),
    (2, 1, 1, 7), (2, 3, 1, 7), (1, 3, 5, 7), (2, 1, 5, 1), (2, 3, 5, 7), (2, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape", MASKS)
def test_masks_broadcast(backend, shape):
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 6)
    keep, added = torch.rand(shape) > 0.4, torch.randn(shape)
    near(SDPA(q, k, v, keep), definition(q, k, v, keep))
    near(SDPA(q, k, v, keep.expand(2, 3, 5, 7)), definition(q, k, v, keep))
    same_gradients(SDPA, definition, q, k, v, added)
    stretched = torch.randn(shape).expand(2, 3, 5, 7)
    same_gradients(SDPA, definition, q, k, v, stretched)


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (3, 5, 7), (1, 1, 3, 1, 7), (4, 2, 3, 5, 7)])
def test_masks_of_five_dimensions(backend, shape):
    q, k, v = (torch.randn(4, 2, 3, n, 8) for n in (5, 7, 7))
    same_gradients(SDPA, definition, q, k, v, torch.randn(shape))
    keep = torch.rand(shape) > 0.4
    near(SDPA(q, k, v, keep), definition(q, k, v, keep))


@pytest.mark.parametrize(("q_shape", "shape"), [((5, 8), (5, 7)), ((3, 5, 8), (3, 1, 7))])
def test_masks_of_fewer_dimensions(backend, q_shape, shape):
    q, k = torch.randn(q_shape), torch.randn(*q_shape[:-2], 7, 8)
    same_gradients(lambda q, k, m: SDPA(q, k, k, m), lambda q, k, m: definition(q, k, k, m),
                   q, k, torch.randn(shape))  # fmt: skip


def test_a_stretched_leaf_gets_a_gradient_for_each_place(backend):
    q, k, v = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    row = torch.randn(5, 7)
    stretched = row.expand(2, 3, 5, 7).detach().requires_grad_()
    whole = row.expand(2, 3, 5, 7).clone().requires_grad_()
    for mask in (stretched, whole):
        SDPA(q, k, v, mask).square().sum().backward()
    torch.testing.assert_close(stretched.grad, whole.grad)
    assert not torch.equal(whole.grad[0], whole.grad[1])


def test_the_gradient_of_a_stretched_view_is_summed(backend):
    q, k, v = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    same_gradients(
        lambda m: SDPA(q, k, v, m.expand(2, 3, 5, 7)),
        lambda m: definition(q, k, v, m.expand(2, 3, 5, 7)),
        torch.randn(1, 3, 1, 7),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_float32_mask_goes_with_any_query(backend, dtype):
    q, k, v = (torch.randn(2, 3, n, 8).to(dtype) for n in (5, 7, 7))
    mask = torch.randn(5, 7, requires_grad=True)
    out = SDPA(q, k, v, mask)
    assert out.dtype == dtype
    near(out, definition(q, k, v, mask))
    out.sum().backward()
    assert mask.grad.dtype == torch.float32


def test_rows_without_a_key_are_zero(backend):
    keep = torch.rand(2, 1, 5, 7) > 0.3
    keep[0, :, 2] = False
    for mask in (keep, torch.zeros(2, 1, 5, 7).masked_fill(~keep, -torch.inf)):
        q, k, v = leaves(*(torch.randn(2, 3, n, 8) for n in (5, 7, 7)))
        out = SDPA(q, k, v, mask)
        near(out, definition(q, k, v, mask))
        assert not out[0, :, 2].any()
        out.sum().backward()
        assert not q.grad[0, :, 2].any()
        assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_hidden_keys_may_hold_anything(backend):
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 7, 7))
    keep = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    keep[..., 3:5] = False
    want = definition(q, k, v, keep)
    k[:, :, 3], v[:, :, 4], v[:, :, 3] = torch.nan, torch.inf, torch.nan
    q, k, v = leaves(q, k, v)
    out = SDPA(q, k, v, keep)
    near(out, want)
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_causal_bias_of_pytorch(backend):
    q, k, v = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    seen = torch.ones(5, 7, dtype=torch.bool)
    near(SDPA(q, k, v, causal_upper_left(5, 7)), definition(q, k, v, seen.tril()))
    near(SDPA(q, k, v, causal_lower_right(5, 7)), definition(q, k, v, seen.tril(2)))
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        SDPA(q, k, v, causal_upper_left(5, 7), is_causal=True)
    with pytest.raises(RuntimeError, match=r"lengths \(5, 6\), expected \(5, 7\)"):
        SDPA(q, k, v, causal_upper_left(5, 6))


# ------------------------------------------------------------- options of SDPA


@pytest.mark.parametrize("scale", [0.3, 2, 0, -1.5, torch.tensor(0.7), torch.tensor(2)])
def test_scale(backend, scale):
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    near(SDPA(q, k, v, scale=scale), definition(q, k, v, scale=float(scale)))


@pytest.mark.parametrize(
    "shape", [(2, 2, 3, 0, 4), (2, 2, 3, 5, 0), (0, 2, 3, 3, 4), (2, 0, 3, 3, 4), (2, 2, 0, 3, 4)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_zero(backend, shape, causal):
    b, h, lq, lk, d = shape
    q, k, v = leaves(torch.randn(b, h, lq, d), torch.randn(b, h, lk, d), torch.randn(b, h, lk, 6))
    out = SDPA(q, k, v, is_causal=causal)
    assert out.shape == (b, h, lq, 6)
    seen = torch.ones(lq, lk, dtype=torch.bool).tril() if causal else None
    if lk:
        near(out, definition(q, k, v, seen, scale=None if d else 1.0))
    else:
        assert not out.any()
    out.sum().backward()
    assert all(t.grad.shape == t.shape and t.grad.isfinite().all() for t in (q, k, v))


def test_no_head_dim_gives_the_average(backend):
    q, k, v = torch.empty(2, 3, 5, 0), torch.empty(2, 3, 7, 0), torch.randn(2, 3, 7, 4)
    near(SDPA(q, k, v), v.mean(2, keepdim=True).expand(2, 3, 5, 4))


def test_dropout_is_governed_by_manual_seed(backend):
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    torch.manual_seed(7)
    first, second = SDPA(q, k, v, dropout_p=0.5), SDPA(q, k, v, dropout_p=0.5)
    torch.manual_seed(7)
    assert torch.equal(SDPA(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    torch.manual_seed(8)
    assert not torch.equal(SDPA(q, k, v, dropout_p=0.5), first)
    state = torch.get_rng_state()
    SDPA(q, k, v, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("function", [SDPA, attnkit.attention])
def test_dropout_of_everything(backend, function):
    q, k, v = leaves(*(torch.randn(1, 2, 5, 8) for _ in range(3)))
    v.data[0, 0, 0, 0] = torch.nan
    out = function(q, k, v, dropout_p=1.0)
    assert out.shape == (1, 2, 5, 8)
    assert not out.any()
    out.sum().backward()
    assert not any(t.grad.any() for t in (q, k, v))


def test_dropout_of_everything_leaves_lse(backend):
    q, k, v, bias = leaves(*(torch.randn(1, 2, 5, 8) for _ in range(3)), torch.randn(5, 5))
    out, lse = attnkit.attention(q, k, v, bias=bias, dropout_p=1.0, return_lse=True)
    torch.testing.assert_close(lse, attnkit.attention(q, k, v, bias=bias, return_lse=True)[1])
    assert not torch.autograd.grad(out.sum(), bias, retain_graph=True)[0].any()
    assert torch.autograd.grad(lse.sum(), bias)[0].all()


def test_tensor_subclasses_are_asked():
    class Logged(torch.Tensor):
        seen = None

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is SDPA:
                Logged.seen = kwargs["is_causal"]
            return super().__torch_function__(func, types, args, kwargs or {})

    q = torch.randn(1, 2, 5, 8)
    out = SDPA(q.as_subclass(Logged), q, q, is_causal=True)
    assert Logged.seen is True
    assert isinstance(out, Logged)
    near(out.as_subclass(torch.Tensor), SDPA(q, q, q, is_causal=True))
    k = torch.randn(1, 2, 7, 8)
    bias = causal_lower_right(5, 7)
    out = SDPA(q.as_subclass(Logged), k, k, bias)
    near(out.as_subclass(torch.Tensor), SDPA(q, k, k, bias))


def test_meta_tensors_have_shapes():
    q = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16)
    out = SDPA(q, q, q[..., :4], is_causal=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 5, 4), torch.bfloat16, "meta")


# ------------------------------------------------------------- autocast


@pytest.mark.parametrize("function", [SDPA, attnkit.attention])
def test_autocast_lowers_the_inputs(backend, function):
    q, k, v = leaves(*(torch.randn(2, 3, n, 8) for n in (5, 7, 7)))
    mask = torch.randn(5, 7)
    given = {"attn_mask": mask} if function is SDPA else {"mask": mask}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(q, k.bfloat16(), v, **given)
        theirs = F.scaled_dot_product_attention(q, k.bfloat16(), v, attn_mask=mask)
        low = function(q, k, v, **{n: m.half() for n, m in given.items()})
        out.float().sum().backward()
    assert out.dtype == theirs.dtype == low.dtype == torch.bfloat16
    near(out, definition(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask))
    assert q.grad.dtype == torch.float32
    a, b, c = leaves(*(t.detach().bfloat16().double() for t in (q, k, v)))
    definition(a, b, c, mask).sum().backward()
    near(q.grad.bfloat16(), a.grad)


def test_autocast_leaves_float64_alone(backend):
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert SDPA(q, q, q).dtype == torch.float64


# ------------------------------------------------------------- the full call


def full(q, k, v, seen, alibi, softcap, sinks, bias):
    """(out, lse) of attention() in float64, alibi aligned bottom-right."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    s = softcap * torch.tanh(s / softcap)
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    s = s - alibi.double()[..., None, None] * (i - torch.arange(k.shape[2])).abs() + bias
    s = s.masked_fill(~seen, -torch.inf)
    s = torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v.repeat_interleave(group, 1), s.logsumexp(-1)


@pytest.mark.parametrize("alibi_shape", [(4,), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_with_everything(backend, ran, alibi_shape, dtype):
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    alibi, lengths = torch.rand(alibi_shape), torch.tensor([9, 4])
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4) & (
        torch.arange(9) < lengths[:, None, None, None]
    )
    mask = masks.causal(bottom_right=True) & masks.padding(lengths)
    inputs = [t.to(dtype) for t in (q, k, v, torch.randn(4), torch.randn(1, 4, 1, 9))]

    def ours(q, k, v, sinks, bias):
        return attnkit.attention(
            q, k, v, mask=mask, bias=bias, alibi=alibi, softcap=3.0, sinks=sinks, return_lse=True
        )

    def truth(q, k, v, sinks, bias):
        return full(q, k, v, seen, alibi, 3.0, sinks, bias)

    same_gradients(lambda *t: ours(*t)[0], lambda *t: truth(*t)[0], *inputs)
    same_gradients(lambda *t: ours(*t)[1], lambda *t: truth(*t)[1], *inputs)
    assert ran == [f"{backend}.forward", f"{backend}.backward"] * 2


def test_gradients_of_out_and_lse_together(backend):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))

    def both(q, k, v):
        out, lse = attnkit.attention(q, k, v, return_lse=True)
        return out.sum(-1) * lse

    def truth(q, k, v):
        return definition(q, k, v).sum(-1) * (q @ k.mT / math.sqrt(8)).logsumexp(-1)

    same_gradients(both, truth, q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_the_results(backend, dtype):
    q, k, v = (torch.randn(2, 3, 5, 8).to(dtype) for _ in range(3))
    out, lse = attnkit.attention(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    near(out, definition(q, k, v))
    near(lse, (q.double() @ k.double().mT / math.sqrt(8)).logsumexp(-1).to(lse.dtype))


def test_a_mask_may_be_a_tensor(backend):
    q, k, v = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    keep, added = torch.rand(5, 7) > 0.3, torch.randn(3, 1, 7)
    near(attnkit.attention(q, k, v, mask=keep), definition(q, k, v, keep))
    both = added.expand(3, 5, 7).masked_fill(~keep, -torch.inf)
    near(attnkit.attention(q, k, v, mask=keep, bias=added), definition(q, k, v, both))
    near(attnkit.attention(q, k, v, mask=added, bias=added), definition(q, k, v, 2 * added))


def test_the_same_seed_drops_the_same_weights():
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    for seed in (12345, torch.tensor([12345]), 2**64 - 3, torch.tensor(-3)):
        outs = []
        for name, reason in attnkit.explain(q, k, v, dropout_p=0.4).items():
            if reason is not None:
                continue
            with attnkit.use_backend(name):
                outs.append(attnkit.attention(q, k, v, dropout_p=0.4, seed=seed))
        weights = attnkit.attention_weights(q, k, dropout_p=0.4, seed=seed)
        share = (weights == 0).float().mean()
        assert 0.35 < share < 0.45
        for out in outs:
            torch.testing.assert_close(out, weights @ v)
    same = [attnkit.attention(q, k, v, dropout_p=0.4, seed=s) for s in (2**64 - 3, -3)]
    assert torch.equal(*same)


# ------------------------------------------------------------- weights


def test_attention_weights_of_chosen_rows_and_heads():
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8)
    kwargs = {
        "mask": masks.causal() & masks.padding(torch.tensor([9, 3])),
        "bias": torch.randn(4, 6, 9),
        "alibi": torch.rand(2, 4),
        "sinks": torch.randn(4),
        "softcap": 2.0,
        "dropout_p": 0.3,
        "seed": 5,
    }
    whole = attnkit.attention_weights(q, k, **kwargs)
    assert whole.shape == (2, 4, 6, 9)
    v = torch.eye(9).expand(2, 2, 9, 9)
    torch.testing.assert_close(whole, attnkit.attention(q, k, v, **kwargs))
    some = attnkit.attention_weights(q, k, rows=[5, 0], heads=torch.tensor([3, 1, 1]), **kwargs)
    torch.testing.assert_close(some, whole[:, [3, 1, 1]][:, :, [5, 0]])
    one = attnkit.attention_weights(q, k, rows=2, heads=range(4), **kwargs)
    torch.testing.assert_close(one, whole[:, :, 2:3])
    assert attnkit.attention_weights(q, k, rows=[]).shape == (2, 4, 0, 9)
    assert not attnkit.attention_weights(q, k, dropout_p=1.0).any()


def test_attention_weights_are_differentiable_and_keep_the_dtype():
    q, k = leaves(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8))
    out = attnkit.attention_weights(q, k)
    torch.testing.assert_close(out, (q @ k.mT / math.sqrt(8)).softmax(-1))
    target = torch.randn_like(out)
    a = torch.autograd.grad((out * target).sum(), (q, k))
    b = torch.autograd.grad(((q @ k.mT / math.sqrt(8)).softmax(-1) * target).sum(), (q, k))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
    assert attnkit.attention_weights(q.half(), k.half()).dtype == torch.float16


# ------------------------------------------------------------- packed sequences

PACKED = [
    ([3, 5, 0, 7], [3, 5, 0, 7]),
    ([3, 5, 2, 7], [6, 5, 1, 0]),
    ([1], [4]),
    ([], []),
]


@pytest.mark.parametrize(("lq", "lk"), PACKED)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"causal": True}, {"causal": True, "bottom_right": False}, {"window": (2, 1)},
     {"window": (1, -1), "causal": True}],
)  # fmt: skip
def test_packed_sequences_are_what_they_are_alone(backend, ran, lq, lk, kwargs):
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in (lq, lk))
    q = torch.randn(sum(lq) + 2, 4, 8)  # two rows belong to no sequence
    k, v = torch.randn(sum(lk), 2, 8), torch.randn(sum(lk), 2, 6)

    def alone(q, k, v, pick=0):
        bottom_right = kwargs.get("bottom_right", True)
        left, right = (None if n < 0 else n for n in kwargs.get("window", (-1, -1)))
        right = 0 if kwargs.get("causal") else right
        mask = masks.sliding_window(left, right, bottom_right)
        outs, lses = [], []
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            x, y, z = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
            with attnkit.use_backend("reference"):
                out, lse = attnkit.attention(x, y, z, mask=mask, return_lse=True)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        outs.append(q.new_zeros(2, 4, 6))
        lses.append(q.new_full((4, 2), -torch.inf))
        return torch.cat(outs) if pick == 0 else torch.cat(lses, 1)

    def packed(q, k, v):
        return attnkit.varlen_attention(q, k, v, cu_q, cu_k, 9, 9, **kwargs)

    same_gradients(packed, alone, q, k, v)
    assert ran.count(f"{backend}.forward") >= 1
    _, lse = attnkit.varlen_attention(q, k, v, cu_q.int(), cu_k.int(), return_lse=True, **kwargs)
    near(lse, alone(q, k, v, 1))


def test_packed_sequences_with_the_other_options(backend):
    cu = torch.tensor([0, 4, 9])
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    options = {"alibi": torch.rand(2), "sinks": torch.randn(2), "softcap": 4.0, "scale": 0.2}
    out = attnkit.varlen_attention(q, k, v, cu, cu, causal=True, **options)
    for a, b in ((0, 4), (4, 9)):
        x, y, z = (t[a:b].transpose(0, 1)[None] for t in (q, k, v))
        alone = attnkit.attention(x, y, z, mask=masks.causal(bottom_right=True), **options)
        torch.testing.assert_close(out[a:b], alone[0].transpose(0, 1))
    dropped = [attnkit.varlen_attention(q, k, v, cu, cu, dropout_p=0.5, seed=3) for _ in range(2)]
    assert torch.equal(*dropped)
    assert not attnkit.varlen_attention(q, k, v, cu, cu, dropout_p=1.0).any()


# ------------------------------------------------------------- decoding


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("left", [None, 2])
def test_decoding_is_attention_to_the_filled_slots(backend, ran, new, left):
    lengths = torch.tensor([3, 9, 5], dtype=torch.int32)
    q, k, v = torch.randn(3, 4, new, 8), torch.randn(3, 2, 12, 8), torch.randn(3, 2, 12, 6)
    keep = torch.rand(3, 12) > 0.2
    options = {"alibi": torch.rand(4), "sinks": torch.randn(4), "softcap": 4.0}
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = torch.nan
    out, lse = attnkit.decode_attention(
        q, k, v, lengths, keep=keep, left=left, return_lse=True, **options
    )
    assert ran == [f"{backend}.decode"]
    for b, n in enumerate(lengths):
        mask = masks.sliding_window(left, 0, bottom_right=True) & masks.key_padding(keep[b, :n])
        one, its = attnkit.attention(
            q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], mask=mask, return_lse=True,
            **options)  # fmt: skip
        near(out[b], one[0])
        near(lse[b], its[0])
    every = attnkit.decode_attention(q, k, v, lengths, causal=False)
    for b, n in enumerate(lengths):
        one = attnkit.attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        near(every[b], one[0])


# ------------------------------------------------------------- which backend


def test_explain_names_every_backend_and_the_choice():
    q = torch.randn(1, 2, 5, 8)
    answer = attnkit.explain(q, q, q, mask=masks.causal())
    assert list(answer) == list(dispatch.BACKENDS)
    assert answer.chosen == attnkit.available_backends()[0]
    assert answer["reference"] is None
    assert answer.note == ""
    assert f"{answer.chosen}" in str(answer)
    with attnkit.use_backend("reference"):
        assert attnkit.explain(q, q, q).chosen == "reference"
    assert "second derivatives" in attnkit.explain(q.requires_grad_(), q, q).note
    notes = []
    torch.func.grad(lambda t: (notes.append(attnkit.explain(t, t, t)), t.sum())[1])(q.detach())
    assert "torch.func" in notes[0].note
    assert notes[0].chosen is None


def test_a_reason_is_given_for_a_device_without_kernels():
    q = torch.empty(1, 2, 5, 8, device="meta")
    answer = attnkit.explain(q, q, q)
    assert answer["reference"] is None
    assert isinstance(answer["cpu"], str)
    with (
        attnkit.use_backend("cpu"),
        pytest.raises(NotImplementedError, match="backend 'cpu' cannot serve this call: "),
    ):
        SDPA(q, q, q)


@pytest.mark.parametrize(("major", "served"), [(7, False), (8, True), (12, True)])
def test_the_age_of_a_gpu_is_asked(major, served, monkeypatch):
    found = SimpleNamespace(major=major, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    reason = _gpu.too_old(torch.device("cuda", 1))
    assert reason == (None if served else "cuda:1 is sm_75, older than sm_80 (A100)")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_age_of_a_fake_gpu_is_not_asked():
    with FakeTensorMode():
        q = torch.empty(1, 2, 5, 8, device="cuda", dtype=torch.float16)
        assert _gpu.too_old(q.device) is None
        assert "reference" in attnkit.explain(q, q, q)


def test_a_backend_that_is_there_is_available(monkeypatch):
    monkeypatch.setattr(cuda, "_missing", lambda *_: None)
    assert "cuda" in attnkit.available_backends()


def test_use_backend_nests_decorates_and_restores(ran):
    q = torch.randn(1, 2, 5, 8)

    @attnkit.use_backend("reference")
    def inside():
        return SDPA(q, q, q)

    inside()
    with attnkit.use_backend("reference"):
        with attnkit.use_backend("reference"):
            SDPA(q, q, q)
        SDPA(q, q, q)
    assert ran == ["reference.forward"] * 3
    with pytest.raises(ZeroDivisionError), attnkit.use_backend("reference"):
        raise ZeroDivisionError
    SDPA(q, q, q)
    assert ran[-1] == f"{attnkit.available_backends()[0]}.forward"


def test_use_backend_is_of_its_thread_and_its_task():
    import asyncio
    import threading

    seen = []
    with attnkit.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.forced_backend()))
        thread.start()
        thread.join()
    assert seen == [None]

    async def one(name, gate, other):
        with attnkit.use_backend(name):
            gate.set()
            await other.wait()
            return dispatch.forced_backend()

    async def both():
        a, b = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(one("cpu", a, b), one("reference", b, a))

    assert asyncio.run(both()) == ["cpu", "reference"]


def test_context_parallel_is_refused(monkeypatch):
    from torch.distributed.tensor.experimental._context_parallel import _attention

    def replaced(*args, **kwargs):
        raise AssertionError("never called")

    q = torch.randn(1, 2, 5, 8)
    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    SDPA(q, q, q)  # another replacement is nobody's shard
    monkeypatch.undo()
    _attention._distribute_function(F.scaled_dot_product_attention, F, None, None, None)
    try:
        for function in (SDPA, attnkit.attention):
            with pytest.raises(RuntimeError, match="context_parallel"):
                function(q, q, q)
    finally:
        _attention._restore_function(F.scaled_dot_product_attention, F)
    SDPA(q, q, q)
