"""Dropout: which weights go is a matter of seed and index alone, the same for every backend."""

from __future__ import annotations

import pytest
import torch

from attnkit import dispatch, testing
from attnkit.backends import reference
from attnkit.spec import AttentionSpec, TensorArgs
from attnkit.testing import Case

pytestmark = pytest.mark.isa
SEED = 0x0123456789ABCDEF


def weights_seen(backend, seed, p, batch=2, heads=3, queries=21, keys=133, dtype=torch.float32):
    """The weights after dropout, read off with the identity as values; uniform before."""
    q = torch.zeros(batch, heads, queries, 8, dtype=dtype)
    k = torch.zeros(batch, heads, keys, 8, dtype=dtype)
    v = torch.eye(keys, dtype=dtype).expand(batch, heads, keys, keys)
    args, spec = TensorArgs(seed=torch.tensor(seed)), AttentionSpec(1.0, dropout_p=p)
    return dispatch.BACKENDS[backend].forward(q, k, v, args, spec)


@pytest.mark.parametrize("seed", [SEED, 0, -1, 2**63 - 1])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.7, 0.999])
def test_the_mask_is_philox(backend, seed, p):
    out, lse = weights_seen(backend, seed, p)
    b, h, i, j = (torch.arange(n) for n in (2, 3, 21, 133))
    bits = reference.philox(
        torch.tensor(seed), b[:, None, None, None], h[:, None, None], i[:, None], j
    )
    kept = (bits >> 8).double() * 2.0**-24 >= p
    assert torch.equal(out != 0, kept)
    torch.testing.assert_close(out.double(), kept.double() / (133 * (1 - p)), atol=0, rtol=1e-5)
    torch.testing.assert_close(lse, torch.full_like(lse, 133.0).log())  # of all weights


def test_the_vector_of_the_design(backend):
    """Seed 0x0123456789abcdef, b 3, h 5, i 2, j 4..7: 3222f107 5ead1ca2 4a79c458 8c50d8e8."""
    words = (0x3222F107, 0x5EAD1CA2, 0x4A79C458, 0x8C50D8E8)
    for word in words:
        edge = (word >> 8) * 2.0**-24
        for p in (edge, edge + 2.0**-24):
            out, _ = weights_seen(backend, SEED, p, batch=4, heads=6, queries=3, keys=8)
            want = [(w >> 8) * 2.0**-24 >= p for w in words]
            assert (out[3, 5, 2, 4:8] != 0).tolist() == want


@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_the_same_for_every_dtype(backend, dtype):
    out, _ = weights_seen(backend, SEED, 0.4, dtype=dtype)
    want, _ = weights_seen("reference", SEED, 0.4)
    assert torch.equal(out != 0, want != 0)


def test_the_share_that_goes(backend):
    out, _ = weights_seen(backend, 7, 0.25, batch=4, heads=4, queries=64, keys=256)
    assert abs(float((out == 0).double().mean()) - 0.25) < 0.003  # 3.5 standard deviations
    assert not torch.equal(out[0], out[1])
    assert not torch.equal(out[:, 0], out[:, 1])
    assert not torch.equal(out[:, :, 0], out[:, :, 1])


def test_indices_are_local_to_the_sequence(backend):
    """A packed sequence drops what batch entry n drops of the padded call."""
    lengths, n = ((33, 70), (5, 64), (64, 33)), 3
    x = testing.build(Case("", heads=4, kv_heads=2, packed=lengths, dropout_p=0.5), torch.float32)
    got = testing.run(backend, x, gradients=False).out
    q, k, v = (torch.zeros(n, t.shape[1], 70, t.shape[3]) for t in x[:3])
    row = column = 0
    for b, (lq, lk) in enumerate(lengths):
        q[b, :, :lq] = x.q[0, :, row : row + lq]
        k[b, :, :lk], v[b, :, :lk] = (t[0, :, column : column + lk] for t in (x.k, x.v))
        row, column = row + lq, column + lk
    args = TensorArgs(
        lengths=torch.tensor([lk for _, lk in lengths], dtype=torch.int32), seed=x.args.seed
    )
    padded = dispatch.BACKENDS[backend].forward(q, k, v, args, x.spec)[0]
    want = torch.cat([padded[b, :, :lq] for b, (lq, _) in enumerate(lengths)], 1)[None]
    torch.testing.assert_close(got, want)


def test_without_a_key_or_with_none_kept(backend):
    x = testing.build(Case("", dropout_p=1.0, hide="lengths", sinks=True), torch.float32)
    got = testing.run(backend, x)
    for name in ("out", "dv"):
        assert (getattr(got, name) == 0).all()
    testing.check(got, testing.expect(x))


def test_weights_are_the_ones_used(backend):
    """`reference.weights` with the same seed, in the middle of everything else."""
    case = Case("", 2, 4, 2, 33, 130, 16, right=20, hide="lengths", alibi="head", sinks=True,
                softcap=3.0, dropout_p=0.3)  # fmt: skip
    x = testing.build(case, torch.float32)
    x = x._replace(v=torch.eye(130).expand(2, 2, 130, 130))
    out = dispatch.BACKENDS[backend].forward(*x[:5])[0]
    p = reference.weights(x.q, x.k, x.args, x.spec)
    assert torch.equal(out != 0, p != 0)
    torch.testing.assert_close(out, p)


@pytest.mark.parametrize("axes", ["bhqk", "1hqk", "b11k", "11q1"])
def test_gradient_of_a_bias(backend, axes):
    """Of every entry of the scores, and summed over what was broadcast."""
    case = Case("", 2, 4, 2, 33, 130, 16, bias=f"float:{axes}", dropout_p=0.3)
    x = testing.build(case, torch.float32)
    testing.check(testing.run(backend, x), testing.expect(x))
