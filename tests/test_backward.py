"""All gradients of every backend against float64: q, k, v, bias and sinks, through out and lse."""

from __future__ import annotations

import math

import pytest
import torch

from attnkit import dispatch, testing
from attnkit.spec import TensorArgs
from attnkit.testing import Case, Results

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


def calls():
    """All cases in float32; the pairs in one other dtype in turn, the rare ones in all.

    What is marked also runs on each instruction set (test_instruction_sets.py).
    """
    for n, case in enumerate(testing.cases()):
        pair = case.name.startswith("pair")
        for d, dtype in enumerate(testing.DTYPES):
            if not pair or n % 8 == 0 or d in (0, 1 + n % 3):
                marks = [] if pair and n % 8 else pytest.mark.isa
                yield pytest.param(case, dtype, id=f"{case}-{dtype}", marks=marks)


@pytest.mark.parametrize(("case", "dtype"), calls())
def test_contract(backend, case, dtype):
    x, want = testing.expected(case, dtype)
    testing.check(testing.run(backend, x), want, case)


@pytest.mark.isa
@pytest.mark.parametrize("dim", [1, 3, 8, 33, 48, 64, 79, 100, 257, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_sizes(backend, dim, dtype):
    case = Case("", 1, 2, 1, 19, 35, dim, max(dim - 3, 1), right=4)
    x, want = testing.expected(case, dtype)
    testing.check(testing.run(backend, x), want, dim)


@pytest.mark.isa
@pytest.mark.parametrize("lengths", [(1, 2), (2, 3), (5, 7), (6, 64), (7, 66), (12, 33), (97, 129)])
def test_lengths_around_a_tile(backend, lengths):
    for right in (None, 0):
        case = Case("", 1, 2, 2, *lengths, 16, right=right)
        x, want = testing.expected(case, torch.float32)
        testing.check(testing.run(backend, x), want, (lengths, right))


# ------------------------------------------------------------- the interface


EVERYTHING = Case("", 2, 4, 2, 70, 80, 16, 8, right=20, bias="float:1hqk", sinks=True, softcap=3.0)


def backward(backend, x, needs, dlse=True):
    module = dispatch.BACKENDS[backend]
    out, lse = module.forward(x.q, x.k, x.v, x.args, x.spec)
    with testing.poisoned_memory():
        grads = module.backward(
            x.dout, x.dlse if dlse else None, x.q, x.k, x.v, out, lse, x.args, x.spec, needs
        )
    return Results(out, lse, *grads)


@pytest.mark.isa
@pytest.mark.parametrize("wanted", [*((n,) for n in range(5)), (0, 2), (1, 3), (2, 4), ()])
def test_only_what_is_wanted(backend, wanted):
    """The same numbers whatever else is asked for, and None for the rest."""
    x, want = testing.expected(EVERYTHING, torch.float32)
    got = backward(backend, x, tuple(n in wanted for n in range(5)))
    for n, name in enumerate(GRADIENTS):
        assert (getattr(got, name) is not None) == (n in wanted)
    testing.check(got, want, wanted)


@pytest.mark.isa
def test_without_a_gradient_of_lse(backend):
    x = testing.build(EVERYTHING, torch.float32)
    x = x._replace(dlse=torch.zeros_like(x.dlse))
    want = testing.expect(x)
    testing.check(backward(backend, x, (True,) * 5, dlse=False), want)
    testing.check(backward(backend, x, (True,) * 5), want)


@pytest.mark.isa
def test_lse_alone(backend):
    """The gradient of logsumexp: q gets the weighted mean of the keys, v gets nothing."""
    x = testing.build(EVERYTHING, torch.float32)
    x = x._replace(dout=torch.zeros_like(x.dout))
    got = backward(backend, x, (True,) * 5)
    testing.check(got, testing.expect(x))
    assert (got.dv == 0).all()


@pytest.mark.isa
@pytest.mark.parametrize(
    "pattern", ["bhqk", "11qk", "1h11", "b1q1", "111k", "bh1k", "1111", "bhq1"]
)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("float", torch.float32), ("float", torch.bfloat16), ("float32", torch.float64)],
    ids=str,
)
def test_bias_gradients_are_summed(backend, pattern, kind, dtype):
    case = Case("", 3, 2, 1, 70, 67, 8, bias=f"{kind}:{pattern}", right=30)
    x, want = testing.expected(case, dtype)
    got = testing.run(backend, x)
    sizes = {"1": 1, "b": 3, "h": 2, "q": 70, "k": 67}
    assert got.dbias.shape == tuple(sizes[letter] for letter in pattern)
    testing.check(got, want, pattern)


@pytest.mark.isa
def test_bias_of_odd_strides(backend):
    x = testing.build(Case("", 2, 2, 2, 33, 40, 8), torch.float32)
    bias = torch.randn(40, 33, 2, 4)[..., ::2].permute(3, 2, 1, 0)  # [2, 2, 33, 40]
    x = x._replace(args=TensorArgs(bias=bias))
    testing.check(testing.run(backend, x), testing.expect(x))


# ------------------------------------------------------------- rows and keys that do not count


@pytest.mark.isa
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("bias", ["bool:11qk", "float:11qk"])
def test_rows_without_keys(backend, bias, sinks):
    x = testing.build(Case("", 2, 4, 2, 33, 40, 8, bias=bias, sinks=sinks), torch.float32)
    if bias.startswith("float"):
        small = x.args.bias[:1, :1].clone()
        small[:, :, 7] = -math.inf
        x = x._replace(args=x.args._replace(bias=small.expand(2, 4, 33, 40)))
    dead = ~testing.visible(x).any(-1)
    assert dead.any()
    got = testing.run(backend, x)
    testing.check(got, testing.expect(x))
    assert (got.out[dead] == 0).all()
    assert (got.dq[dead] == 0).all()
    if sinks:
        assert torch.equal(got.lse[dead], x.args.sinks[:, None].expand(2, 4, 33)[dead])
    else:
        assert (got.lse[dead] == -math.inf).all()


@pytest.mark.isa
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_rows_without_keys_pass_nothing_on(backend, dtype):
    """Whatever stands in a query that sees no key, or comes back as its gradient."""
    x = testing.build(Case("", 2, 4, 2, 70, 80, 16, bias="bool:11qk"), dtype)
    dead = ~testing.visible(x).any(-1)
    assert dead.any()
    clean = testing.run(backend, x)
    spoilt = x._replace(
        q=x.q.masked_fill(dead[..., None], math.nan),
        dout=x.dout.masked_fill(dead[..., None], math.nan),
        dlse=x.dlse.masked_fill(dead, math.nan),
    )
    got = testing.run(backend, spoilt)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(clean, name)), name


@pytest.mark.isa
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "case",
    [
        Case("lengths", 3, 4, 2, 33, 130, 16, hide="lengths"),
        Case("keep", 3, 4, 2, 33, 130, 16, hide="keep", right=40, softcap=2.0),
        Case("bool-bias", 3, 4, 2, 33, 130, 16, bias="bool:b11k"),
        Case("low-bias", 3, 4, 2, 33, 130, 16, bias="float:b11k", low=True, sinks=True),
        Case("band", 3, 4, 2, 33, 130, 16, left=4, right=2),
        Case("blocks", 3, 2, 1, 33, 200, 16, hide="blocks"),
        Case("packed", heads=2, kv_heads=1, packed=((9, 40), (30, 20)), hide="keep", right=0),
    ],
    ids=str,
)
def test_keys_that_no_row_sees(backend, case, value, dtype):
    """Gradient 0 for them, and all other gradients what they are without."""
    x = testing.build(case, dtype)
    hidden = ~testing.visible(x).any(2).any(1)
    assert hidden.any(), "the case hides no key"
    spoilt = hidden[:, None, :, None]
    clean, got = (
        testing.run(backend, x._replace(k=x.k.masked_fill(spoilt, n), v=x.v.masked_fill(spoilt, n)))
        for n in (0.0, value)
    )
    if dtype == torch.bfloat16:  # see test_rows_that_do_not_see_a_key_are_not_touched_by_it
        testing.check(got, testing.expect(x))
    else:
        for name in ("out", *GRADIENTS):
            if getattr(clean, name) is not None:
                assert torch.equal(getattr(got, name), getattr(clean, name)), name
    for grad in (got.dk, got.dv):
        assert (grad.masked_select(spoilt) == 0).all()


@pytest.mark.isa
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_of_rows_that_do_not_see_a_bad_key(backend, value):
    x = testing.build(Case("", 2, 4, 2, 70, 70, 16, right=0), torch.float32)
    bad, clean = x.k.clone(), testing.run(backend, x)
    bad[:, :, -1] = value  # seen by the last row only
    got = testing.run(backend, x._replace(k=bad))
    assert torch.equal(got.dq[:, :, :-1], clean.dq[:, :, :-1])
    assert torch.equal(got.out[:, :, :-1], clean.out[:, :, :-1])


@pytest.mark.isa
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("low", [-1e4, -1e6, -1e9, torch.finfo(torch.float32).min, 1e5])
def test_rows_of_a_very_low_mask(backend, low, sinks):
    """Their lse is a float without room for log(n): the weights may not be taken from it."""
    x = testing.build(Case("", 1, 2, 1, 70, 130, 8, sinks=sinks), torch.float32)
    bias = torch.zeros(1, 1, 70, 130)
    bias[:, :, ::3] = low
    bias[:, :, 1::3, :128] = low
    x = x._replace(args=x.args._replace(bias=bias.expand(1, 2, 70, 130)))
    testing.check(testing.run(backend, x), testing.expect(x))


@pytest.mark.isa
@pytest.mark.parametrize("size", [30.0, 300.0, 3000.0])
def test_large_scores(backend, size):
    x = testing.build(Case("", 1, 2, 1, 33, 130, 16, right=20, bias="float:1hqk"), torch.float32)
    x = x._replace(q=x.q * size)
    testing.check(testing.run(backend, x), testing.expect(x))


@pytest.mark.isa
def test_one_key(backend):
    x = testing.build(Case("", 2, 2, 2, 5, 1, 8), torch.float32)
    x = x._replace(dlse=torch.zeros_like(x.dlse))
    got = testing.run(backend, x)
    testing.check(got, testing.expect(x))
    torch.testing.assert_close(got.dv, x.dout.sum(2, keepdim=True))


# ------------------------------------------------------------- sizes


def test_more_than_65535_batches(backend):
    x = testing.build(Case("", 66000, 1, 1, 2, 3, 4, right=0), torch.float32)
    testing.check(testing.run(backend, x), testing.expect(x))


@pytest.mark.isa
def test_offsets_past_two_to_the_31(backend):
    x = testing.build(Case("", 1, 2, 2, 40, 40, 16), torch.bfloat16)
    module, near = dispatch.BACKENDS[backend], testing.run(backend, x)
    q, k, v, dout = (testing.far_heads(t) for t in (x.q, x.k, x.v, x.dout))
    needs = (True, True, True, False, False)
    got = module.backward(dout, x.dlse, q, k, v, near.out, near.lse, x.args, x.spec, needs)
    for g, w in zip(got[:3], near[2:5], strict=True):
        assert torch.equal(g, w)
