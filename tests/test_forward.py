"""out and lse of every backend against float64: all parts of the contract, alone and in pairs."""

from __future__ import annotations

import math

import pytest
import torch

from attnkit import dispatch, testing
from attnkit.spec import TensorArgs
from attnkit.testing import Case

# Some of the pairs and all rare cases; test_backward.py looks at out and lse of the others, too.
CASES = [c for n, c in enumerate(testing.cases()) if not c.name.startswith("pair") or n % 8 == 0]


def forward(backend, x):
    return testing.run(backend, x, gradients=False)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(backend, case, dtype):
    x, want = testing.expected(case, dtype)
    testing.check(forward(backend, x), want, case)


@pytest.mark.isa
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 13, 33, 40, 48, 56, 64, 79, 100, 192, 257, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_sizes(backend, dim, dtype):
    case = Case("", 1, 2, 1, 19, 35, dim, max(dim - 3, 1), right=4)
    x, want = testing.expected(case, dtype)
    testing.check(forward(backend, x), want, dim)


@pytest.mark.isa
@pytest.mark.parametrize("lengths", [(1, 2), (2, 3), (5, 7), (6, 64), (7, 66), (12, 33), (97, 129)])
def test_lengths_around_a_tile(backend, lengths):
    for right in (None, 0):
        case = Case("", 1, 2, 2, *lengths, 16, right=right)
        x, want = testing.expected(case, torch.float32)
        testing.check(forward(backend, x), want, (lengths, right))


@pytest.mark.isa
@pytest.mark.parametrize("dim", [6, 64])
def test_half_precision_scores_do_not_overflow(backend, dim):
    """Scores near 2.6e5, far above the largest float16."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, n, dim, generator=g) + 180 for n in (9, 33))
    v = torch.randn(1, 2, 33, dim, generator=g)
    x = testing.build(Case("", 1, 2, 2, 9, 33, dim), torch.float16)
    x = x._replace(q=q.half(), k=k.half(), v=v.half())
    # the yardstick in float16 overflows, so it is taken in float32 with the rounding of the result
    up = x._replace(q=x.q.float(), k=x.k.float(), v=x.v.float(), dout=x.dout.float())
    out, lse = forward(backend, x)[:2]
    want = testing.expect(up, gradients=False)
    limit = want.allowed["out"][0] + 2**-11 * float(want.truth.out.abs().max())
    assert (out.double() - want.truth.out).abs().max() <= limit
    assert (lse.double() - want.truth.lse).abs().max() <= want.allowed["lse"][0]


@pytest.mark.isa
@pytest.mark.parametrize("size", [30.0, 300.0, 3000.0])
def test_large_scores(backend, size):
    """Weights of one key only, and hundreds of factors of e between neighbours."""
    x = testing.build(Case("", 1, 2, 2, 111, 130, 16, right=20), torch.float32)
    x = x._replace(q=x.q * size)
    testing.check(forward(backend, x), testing.expect(x, gradients=False), size)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("key", [0, 5, 17, 40, 63, 64, 129])
@pytest.mark.parametrize("queries", [17, 100])
def test_one_key_far_above_the_others(backend, queries, key, dtype):
    """Wherever it stands among keys that every query sees, the softmax is shifted by its score."""
    x = testing.build(Case("", 1, 2, 2, queries, 130, 16), dtype)
    x.q[..., 0] = 40
    x.k[:, :, key, 0] = 40  # 400 above, e^400 overflows
    testing.check(forward(backend, x), testing.expect(x, gradients=False))


# ------------------------------------------------------------- rows of the lowest float


@pytest.mark.isa
def test_rows_of_the_lowest_float_are_uniform(backend):
    x = testing.build(Case("", 1, 1, 1, 3, 70, 8), torch.float32)
    low = torch.finfo(torch.float32).min
    bias = torch.zeros(1, 1, 3, 70)
    bias[:, :, 0] = low
    bias[:, :, 1, 5:] = low
    out, _ = forward(backend, x._replace(args=TensorArgs(bias=bias)))[:2]
    torch.testing.assert_close(out[0, 0, 0], x.v[0, 0].mean(0))
    alone = x._replace(k=x.k[:, :, :5], v=x.v[:, :, :5])
    torch.testing.assert_close(out[:, :, 1], forward(backend, alone).out[:, :, 1])


@pytest.mark.isa
def test_leading_columns_at_the_lowest_float_are_as_if_absent(backend):
    x = testing.build(Case("", 1, 2, 2, 70, 200, 16), torch.float32)
    bias = torch.zeros(1, 1, 1, 200)
    bias[..., :128] = torch.finfo(torch.float32).min
    got = forward(backend, x._replace(args=TensorArgs(bias=bias.expand(1, 2, 70, 200))))
    alone = x._replace(k=x.k[:, :, 128:], v=x.v[:, :, 128:])
    testing.check(got, testing.expect(alone, gradients=False))


# ------------------------------------------------------------- NaN and Inf that nobody sees


def spoil(x: testing.Inputs, hidden: torch.Tensor, value: float) -> testing.Inputs:
    """x with `value` in K and V wherever hidden [B, Lk] says so."""
    spoilt = hidden[:, None, :, None]
    return x._replace(k=x.k.masked_fill(spoilt, value), v=x.v.masked_fill(spoilt, value))


HIDING = [
    Case("lengths", 3, 4, 2, 33, 130, 16, hide="lengths"),
    Case("keep", 3, 4, 2, 33, 130, 16, hide="keep", right=40),
    Case("left", 3, 4, 2, 33, 130, 16, hide="left", sinks=True),
    Case("segments", 3, 4, 2, 33, 130, 16, hide="segments"),
    Case("bool-bias", 3, 4, 2, 33, 130, 16, bias="bool:b11k"),
    Case("low-bias", 3, 4, 2, 33, 130, 16, bias="float32:b11k", low=True),
    Case("band", 3, 4, 2, 33, 130, 16, left=4, right=2, softcap=2.0),
    Case("bottom-right", 3, 4, 2, 33, 130, 16, left=4, right=0, bottom_right=True, alibi="head"),
    Case("blocks", 3, 2, 1, 33, 200, 16, hide="blocks"),
    Case("packed", heads=2, kv_heads=1, packed=((9, 40), (30, 20), (0, 9)), hide="keep", right=0),
]


@pytest.mark.isa
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("case", HIDING, ids=str)
def test_what_no_row_sees_does_not_count(backend, case, value):
    """To the bit, whatever stands at a key that is hidden from every query of its head group."""
    x = testing.build(case, torch.float32)
    hidden = ~testing.visible(x).any(2).any(1)  # [B, Lk]
    assert hidden.any(), "the case hides no key"
    clean = forward(backend, spoil(x, hidden, 0.0))
    got = forward(backend, spoil(x, hidden, value))
    assert torch.equal(got.out, clean.out)
    assert torch.equal(got.lse, clean.lse)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 2, 4, 2, 70, 70, 16, right=0),
        Case("window", 2, 4, 2, 70, 70, 16, left=3, right=2),
        Case("bias", 2, 4, 2, 70, 70, 16, bias="bool:11qk"),
        Case("low", 2, 4, 2, 70, 70, 16, bias="float:11qk", low=True),
        Case("segments", 1, 4, 2, 70, 70, 16, hide="segments"),
    ],
    ids=str,
)
def test_rows_that_do_not_see_a_key_are_not_touched_by_it(backend, case, value, dtype):
    """One bad key, seen by some rows: those may be NaN, all others are what they were."""
    x = testing.build(case, dtype)
    bad = torch.zeros(len(x.k), 70, dtype=torch.bool)
    bad[:, 37] = True
    spared = ~testing.visible(x)[..., 37]
    assert spared.any()
    assert not spared.all()
    clean, got = forward(backend, spoil(x, bad, 0.0)), forward(backend, spoil(x, bad, value))
    if dtype == torch.bfloat16:
        # Processors that multiply pairs of bfloat16 round in their own way, and not where NaN is
        # about: the spared rows are right all the same.
        want = testing.expect(spoil(x, bad, 0.0), gradients=False)
        error = (got.out.double() - want.truth.out)[spared]
        assert error.abs().max() <= want.allowed["out"][0]
    else:
        assert torch.equal(got.out[spared], clean.out[spared])
    assert torch.equal(got.lse[spared], clean.lse[spared])
    if math.isnan(value):
        assert got.out[~spared].isnan().all()


@pytest.mark.isa
def test_a_visible_infinite_value_is_seen(backend):
    x = testing.build(Case("", 1, 2, 2, 9, 70, 16, right=60), torch.float32)
    x.v[0, 1, 66, 3] = math.inf
    out = forward(backend, x).out
    seen = testing.visible(x)[0, 1, :, 66]
    assert not out[0, 1, seen, 3].isfinite().any()
    assert out[0, 1, ~seen].isfinite().all()
    assert out[0, 0].isfinite().all()


# ------------------------------------------------------------- sizes


def test_more_than_65535_batches_and_heads(backend):
    for batch, heads in ((66000, 1), (1, 66000)):
        x = testing.build(Case("", batch, heads, heads, 2, 3, 4, right=0), torch.float32)
        testing.check(forward(backend, x), testing.expect(x, gradients=False))


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_offsets_past_two_to_the_31(backend, dtype):
    """Heads of K and V lie 2^31 elements apart, in memory of which only these pages are touched."""
    x = testing.build(Case("", 1, 2, 2, 5, 40, 16), dtype)
    wide = [testing.far_heads(t) for t in (x.k, x.v)]
    got = dispatch.BACKENDS[backend].forward(x.q, *wide, x.args, x.spec)
    near = dispatch.BACKENDS[backend].forward(x.q, x.k, x.v, x.args, x.spec)
    assert torch.equal(got[0], near[0])
    assert torch.equal(got[1], near[1])


def test_the_fresh_output_is_written_not_the_inputs(backend):
    x = testing.build(Case("", layout="sliced", right=0), torch.float32)
    before = [t.clone() for t in x[:3]]
    forward(backend, x)
    for t, old in zip(x[:3], before, strict=True):
        assert torch.equal(t, old)


@pytest.mark.parametrize("hide", ["", "lengths", "keep", "left", "segments", "blocks"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 65), (0, 0), (5, 0)])
@pytest.mark.parametrize("bias", ["", "float:bhqk"])
def test_no_queries_and_no_keys_under_every_mask(backend, hide, queries, keys, bias):
    x = testing.build(Case("", queries=queries, keys=keys, hide=hide, bias=bias), torch.float32)
    testing.check(testing.run(backend, x), testing.expect(x))
