"""The definition against what is older: hand-worked numbers, loops, torch, finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnkit import testing
from attnkit.backends import reference
from attnkit.spec import AttentionSpec, TensorArgs
from attnkit.testing import Case, Results

SEED = 0x0123456789ABCDEF
F64 = torch.float64


def attend(q, k, v, scale=1.0, **spec):
    return reference.attend(q, k, v, TensorArgs(), AttentionSpec(scale, **spec))[0]


# ------------------------------------------------------------- numbers known from elsewhere


def test_worked_example():
    q = torch.tensor([[1.0, 0], [0, 1], [1, 1]])[None, None]
    k = torch.tensor([[1.0, 0], [1, 0], [0, 1]])[None, None]
    v = torch.tensor([[5.0], [7], [9]])[None, None]
    for scale, want in ((1.0, [6.4661, 7.7284, 7.0]), (2**-0.5, [6.5933, 7.5105, 7.0])):
        got = attend(q, k, v, scale).flatten()
        torch.testing.assert_close(got, torch.tensor(want), atol=5e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_equals_torch(causal, heads):
    hq, hkv = heads
    q, k, v = (torch.randn(2, h, n, 8, dtype=F64) for h, n in ((hq, 9), (hkv, 13), (hkv, 13)))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    got = attend(q, k, v, 8**-0.5, right=0 if causal else None)
    torch.testing.assert_close(got, want)


def by_loops(x: testing.Inputs) -> tuple[Tensor, Tensor]:
    """The formula of the contract, one weight at a time."""
    (batch, hq, lq, _), (hkv, lk) = x.q.shape, x.k.shape[1:3]
    a, spec = x.args, x.spec
    out = torch.zeros(batch, hq, lq, x.v.shape[3], dtype=F64)
    lse = torch.full((batch, hq, lq), -math.inf, dtype=F64)
    off = lk - lq if spec.bottom_right else 0
    for b in range(batch):
        for h in range(hq):
            for i in range(lq):
                scores = {}
                for j in range(lk):
                    if spec.left is not None and j < i + off - spec.left:
                        continue
                    if spec.right is not None and j > i + off + spec.right:
                        continue
                    if a.keep is not None and not a.keep[b, j]:
                        continue
                    if a.lengths is not None and j >= a.lengths[b]:
                        continue
                    if a.q_segments is not None and a.q_segments[b, i] != a.k_segments[b, j]:
                        continue
                    s = spec.scale * float(x.q[b, h, i] @ x.k[b, h // (hq // hkv), j])
                    if spec.softcap:
                        s = spec.softcap * math.tanh(s / spec.softcap)
                    if a.alibi is not None:
                        s -= float(a.alibi[b if len(a.alibi) > 1 else 0, h]) * abs(i + off - j)
                    if a.bias is not None and a.bias.dtype == torch.bool:
                        if not a.bias[b, h, i, j]:
                            continue
                    elif a.bias is not None:
                        s += float(a.bias[b, h, i, j])
                    scores[j] = s
                total = sum(map(math.exp, scores.values()))
                if a.sinks is not None:
                    total += math.exp(float(a.sinks[h]))
                if total > 0:
                    lse[b, h, i] = math.log(total)
                for j, s in scores.items():
                    weight = math.exp(s) / total
                    if spec.dropout_p:
                        lanes = philox_by_integers(SEED, (j // 4, i, h, b))
                        kept = (lanes[j % 4] >> 8) * 2.0**-24 >= spec.dropout_p
                        weight = weight / (1 - spec.dropout_p) if kept else 0.0
                    out[b, h, i] += weight * x.v[b, h // (hq // hkv), j]
    return out, lse


SMALL = {"queries": 6, "keys": 7, "dim": 4, "value_dim": 3}
LOOPED = [
    Case("plain", **SMALL),
    Case("causal", right=0, **SMALL),
    Case("bottom-right", right=0, bottom_right=True, **SMALL),
    Case("window", left=2, right=1, alibi="batch", hide="lengths", **SMALL),
    Case("window-bottom-right", left=1, right=0, bottom_right=True, alibi="head", **SMALL),
    Case("scattered", hide="keep", bias="float:1hq1", sinks=True, softcap=1.5, **SMALL),
    Case("segments", hide="segments", bias="bool:b1qk", scale=-0.7, **SMALL),
    Case("dropout", dropout_p=0.4, sinks=True, softcap=3.0, right=0, **SMALL),
    Case("all", 2, 6, 2, 5, 9, 4, 2, left=3, right=2, bottom_right=True, hide="lengths+keep",
         bias="float:b11k", alibi="head", softcap=2.0, sinks=True, dropout_p=0.2),
]  # fmt: skip


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_equals_the_loops(case):
    x = testing.build(case, F64)
    want = by_loops(x)
    for got in (reference.attend(x.q, x.k, x.v, x.args, x.spec), testing.naive(x, F64)[:2]):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, atol=1e-12, rtol=1e-12)


def test_blocks_equal_the_dense_mask():
    x = testing.build(Case("", queries=130, keys=200, hide="blocks"), F64)
    dense = x.args.blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :130, :200]
    assert 0.2 < dense.double().mean() < 0.9
    args = TensorArgs(bias=dense.expand(2, 4, 130, 200))
    got = reference.forward(x.q, x.k, x.v, x.args, x.spec)
    want = reference.forward(x.q, x.k, x.v, args, x.spec)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_packed_equals_one_by_one():
    lengths = ((5, 9), (0, 3), (12, 4), (3, 0), (8, 8))
    case = Case("", packed=lengths, left=6, right=1, bottom_right=True, alibi="head", sinks=True)
    x = testing.build(case, F64)
    out, lse = reference.forward(x.q, x.k, x.v, x.args, x.spec)
    i = j = 0
    for nq, nk in lengths:
        one = x.args._replace(cu_seqlens_q=None, cu_seqlens_k=None)
        q, k, v = x.q[:, :, i : i + nq], x.k[:, :, j : j + nk], x.v[:, :, j : j + nk]
        o, s = reference.forward(q, k, v, one, x.spec)
        torch.testing.assert_close(out[:, :, i : i + nq], o, atol=1e-14, rtol=1e-12)
        torch.testing.assert_close(lse[:, :, i : i + nq], s, atol=1e-14, rtol=1e-12)
        i, j = i + nq, j + nk


# ------------------------------------------------------------- derivatives and transforms


FULL = Case("", 2, 4, 2, 5, 7, 8, 3, right=0, bottom_right=True, hide="lengths", softcap=2.0,
            bias="float:1h1k", alibi="head", dropout_p=0.3, sinks=True)  # fmt: skip


def differentiable(case=FULL):
    x = testing.build(case, F64)
    bias = x.args.bias[:1, :, :1].clone()
    inputs = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, bias, x.args.sinks)]

    def f(q, k, v, bias, sinks):
        args = x.args._replace(bias=bias.expand(x.args.bias.shape), sinks=sinks)
        return reference.attend(q, k, v, args, x.spec)

    return f, inputs


def finite(f):
    """lse of rows without a key is -inf, which finite differences cannot take."""

    def g(*inputs):
        out, lse = f(*inputs)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    return g


def test_derivatives_equal_finite_differences():
    tiny = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 3, "keys": 4, "dim": 2}
    f, inputs = differentiable(replace(FULL, value_dim=2, **tiny))
    torch.autograd.gradcheck(finite(f), inputs, check_forward_ad=True)
    torch.autograd.gradgradcheck(finite(f), inputs, fast_mode=True)


def test_derivatives_without_a_sink():
    x = testing.build(Case("", 2, 2, 1, 3, 3, 2, hide="lengths+keep"), F64)
    assert not testing.visible(x).any(-1).all(), "no row without keys"
    inputs = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    f = finite(lambda q, k, v: reference.attend(q, k, v, x.args, x.spec))
    torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


def test_vmap_equals_the_loop():
    f, inputs = differentiable()
    stacked = [torch.stack([t, 2 * t, t - 1]).detach() for t in inputs]
    got = torch.func.vmap(f)(*stacked)
    alone = [f(*one) for one in zip(*stacked, strict=True)]
    want = [torch.stack(t) for t in zip(*alone, strict=True)]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_hessian_equals_double_backward():
    f, (q, *others) = differentiable(FULL)
    others = [t.detach() for t in others]

    def loss(q):
        return f(q, *others)[0].square().sum()

    got = torch.func.hessian(loss)(q.detach())
    want = torch.autograd.functional.hessian(loss, q.detach())
    torch.testing.assert_close(got, want)


def test_compiles_to_one_graph():
    f, inputs = differentiable()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(*inputs), f(*inputs), strict=True):
        torch.testing.assert_close(got, want)
    up = torch.randn(2, 4, 5, 3, dtype=F64)
    got = torch.autograd.grad(compiled(*inputs)[0], inputs, up)
    want = torch.autograd.grad(f(*inputs)[0], inputs, up)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_autocast_leaves_it_alone():
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    want = attend(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(q, k, v), want)


# ------------------------------------------------------------- NaN and Inf that are seen


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_visible_value_is_seen(value):
    q, k, v = (torch.randn(1, 1, 4, 3, dtype=F64) for _ in range(3))
    clean = attend(q, k, v, right=0)
    v[0, 0, 2, 1] = value
    out = attend(q, k, v, right=0)
    assert torch.equal(out[:, :, :2], clean[:, :, :2])
    assert torch.equal(out[..., 0], clean[..., 0])
    for row in (2, 3):
        got = out[0, 0, row, 1]
        assert torch.isnan(got) if math.isnan(value) else got == value


def test_visible_infinities_of_both_signs_are_nan():
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=F64) for _ in range(3))
    v[0, 0, 0, 0], v[0, 0, 1, 0] = math.inf, -math.inf
    out = attend(q, k, v, right=0)[0, 0, :, 0]
    assert out[0] == math.inf
    assert out[1:].isnan().all()


def test_a_visible_nan_reaches_the_gradient_of_its_rows_only():
    q, k, v = (torch.randn(1, 1, 4, 3, dtype=F64) for _ in range(3))
    v[0, 0, 2, 1] = math.nan
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attend(q, k, v, right=0).sum(), q)
    assert dq[0, 0, :2].isfinite().all()
    assert dq[0, 0, 2:].isnan().all()


def test_a_visible_key_counts_by_its_score():
    q, k, v = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 3, 2), torch.randn(1, 1, 3, 2)
    k[0, 0, 1, 0] = -math.inf  # score -inf: no weight
    torch.testing.assert_close(attend(q, k, v), v[:, :, ::2].mean(2, keepdim=True))
    k[0, 0, 1, 0] = math.nan
    assert attend(q, k, v).isnan().all()


# ------------------------------------------------------------- weights


def test_weights_are_those_that_attend_uses():
    x = testing.build(FULL, torch.float32)
    p = reference.weights(x.q, x.k, x.args, x.spec)
    out, _ = reference.forward(x.q, x.k, x.v, x.args, x.spec)
    torch.testing.assert_close(p @ x.v.repeat_interleave(2, 1), out)
    assert 0 < (p > 0).double().mean() < 1


def test_weights_of_some_rows_and_heads():
    case = Case("", 3, 4, 2, 70, 80, 8, right=0, hide="blocks+segments", bias="float:bh1k",
                alibi="batch", sinks=True, dropout_p=0.3, bottom_right=True)  # fmt: skip
    x = testing.build(case, F64)
    rows, heads = torch.tensor([69, 0, 65, 3]), torch.tensor([3, 1])
    whole = reference.weights(x.q, x.k, x.args, x.spec)
    some = reference.weights(x.q, x.k, x.args, x.spec, rows=rows, heads=heads)
    torch.testing.assert_close(some, whole[:, heads][:, :, rows])
    assert (some > 0).any()


# ------------------------------------------------------------- dropout's generator


def philox_by_integers(seed, counter):
    """Philox-4x32-10 in Python's own integers."""
    c, (k0, k1) = list(counter), (seed & 0xFFFFFFFF, seed >> 32)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def test_philox_vector():
    i, h, b = (torch.tensor(n) for n in (2, 5, 3))
    got = reference.philox(torch.tensor(SEED), b, h, i, torch.arange(4, 8))
    assert [f"{n:08x}" for n in got.tolist()] == ["3222f107", "5ead1ca2", "4a79c458", "8c50d8e8"]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_philox_equals_integers(seed):
    b, h, i, j = torch.randint(0, 2**31, (4, 100))
    got = reference.philox(torch.tensor([seed]), b, h, i, j)
    for n in range(100):
        lanes = philox_by_integers(seed % 2**64, (int(j[n]) // 4, int(i[n]), int(h[n]), int(b[n])))
        assert got[n] == lanes[int(j[n]) % 4]


# ------------------------------------------------------------- what it refuses


def test_refusals_are_sentences():
    x = testing.build(Case("", packed=((2, 3),)), torch.float32)
    packed = x.args._replace(lengths=torch.tensor([2], dtype=torch.int32))
    for answer in (
        reference.supports(x.q, x.k, x.v, packed, x.spec),
        reference.supports_decode(x.q, x.k, x.v, x.args, x.spec),
        reference.supports_decode(x.q, x.k, x.v, packed, x.spec._replace(dropout_p=0.1)),
    ):
        assert answer is not None
        assert len(answer.split()) > 3
    assert reference.supports(x.q, x.k, x.v, x.args, x.spec) is None


# ------------------------------------------------------------- the yardstick itself


def test_pairwise_has_every_pair():
    axes = {"a": range(3), "b": "wxyz", "c": [True, False], "d": range(5)}
    rows = testing.pairwise(axes)
    assert rows == testing.pairwise(axes)
    assert len(rows) < 30
    for a in axes:
        for b in axes:
            if a < b:
                found = {(row[a], row[b]) for row in rows}
                assert found == {(m, n) for m in axes[a] for n in axes[b]}


def test_fresh_memory_is_poisoned():
    with testing.poisoned_memory():
        assert torch.empty(1000).isnan().all()
        assert torch.zeros(3).new_empty(5, dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", Results._fields)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_the_tolerance_sees_small_faults(name, dtype):
    case = Case("", 2, 4, 2, 17, 65, 16, right=30, bias="float:1hqk", sinks=True)
    want = testing.expected(case, dtype)[1]
    truth = want.truth._asdict()
    exact = Results(**{n: t.to(want.dtypes[n]) for n, t in truth.items()})
    assert testing.complaints(exact, want) == []
    scale = {torch.bfloat16: 1.05, torch.float16: 1.01}.get(dtype, 1.0001)
    wrong = exact._replace(**{name: getattr(exact, name) * scale})
    assert [name in c for c in testing.complaints(wrong, want)].count(True) >= 1
    hole = getattr(exact, name).clone()
    hole.flatten()[-1] = math.nan
    assert name in testing.complaints(exact._replace(**{name: hole}), want)[0]
    short = getattr(exact, name)[..., :-1]
    assert name in testing.complaints(exact._replace(**{name: short}), want)[0]


def test_layouts_have_the_strides_they_are_named_after():
    shapes = {}
    for layout in ("plain", "transposed", "sliced", "inner2", "expanded"):
        x = testing.build(Case("", layout=layout), torch.float32)
        shapes[layout] = x.k.stride()
        plain = testing.build(Case(""), torch.float32)
        assert torch.equal(x.q, plain.q)
        assert torch.equal(x.dout, x.dout + 0)
    assert shapes["inner2"][3] == 2
    assert shapes["transposed"][1] < shapes["transposed"][2]
    assert shapes["expanded"][0] == 0
    assert len(set(shapes.values())) == 5


def test_the_recorder_names_who_ran():
    x = testing.build(Case("tiny", 1, 1, 1, 1, 1, 1), torch.float32)
    before = reference.forward
    with testing.recorded_backends() as ran:
        reference.forward(x.q, x.k, x.v, x.args, x.spec)
    assert ran == ["reference.forward"]
    assert reference.forward is before
