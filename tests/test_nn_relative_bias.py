"""What is added to scores for a distance: T5's buckets and ALiBi's slopes."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from attnkit import attention, masks
from attnkit.nn import RelativePositionBias, alibi_slopes


def bucket(distance: int, buckets: int, farthest: int, bidirectional: bool) -> int:
    """By the definition, in exact numbers."""
    first = 0
    if bidirectional:
        buckets //= 2
        first, distance = (buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    near = buckets // 2
    if distance < near:
        return first + distance
    n = 0
    while near + n + 1 < buckets and Fraction(distance, near) ** (buckets - near) >= Fraction(
        farthest, near
    ) ** (n + 1):
        n += 1
    return first + near + n


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (4, 3)])
def test_buckets_are_t5s_at_every_distance(bidirectional, buckets, farthest):
    bias = RelativePositionBias(1, buckets, farthest, bidirectional)
    distances = range(-2 * farthest, 2 * farthest + 1)
    want = [bucket(d, buckets, farthest, bidirectional) for d in distances]
    assert bias.bucket(torch.tensor(distances)).tolist() == want
    unused = {buckets // 2} if bidirectional else set()  # that of 0 to the right
    assert set(want) == set(range(buckets)) - unused


def test_rows_of_positions():
    bias = RelativePositionBias(3)
    q, k = torch.tensor([[4, 5], [0, 9]]), torch.arange(6)
    out = bias(q, k)
    assert out.shape == (2, 3, 2, 6)
    for b in range(2):
        torch.testing.assert_close(out[b], bias(q[b], k)[0])
        for i in range(2):
            want = bias.weight[bias.bucket(k - q[b, i])].T
            torch.testing.assert_close(out[b, :, i], want)


@pytest.mark.parametrize("batch", [1, 3])
def test_gradient_is_that_of_a_naive_model(batch, backend):
    bias = RelativePositionBias(2, 4, 8, bidirectional=False).double()
    torch.nn.init.normal_(bias.weight)
    q, k, v = (torch.randn(batch, 2, 10, 4, dtype=torch.float64) for _ in range(3))
    places = torch.arange(10)
    out = attention(q, k, v, mask=masks.causal(), bias=bias(places, places))
    (got,) = torch.autograd.grad(out.sin().sum(), bias.weight)

    scores = q @ k.mT / 2
    for i in range(10):
        for j in range(10):
            row = bias.weight[bucket(j - i, 4, 8, False)]
            add = torch.zeros(10, 10, dtype=torch.float64)
            add[i, j] = 1.0
            scores = scores + row[None, :, None, None] * add
    scores = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), -torch.inf)
    naive = scores.softmax(-1) @ v
    torch.testing.assert_close(out, naive)
    (want,) = torch.autograd.grad(naive.sin().sum(), bias.weight)
    torch.testing.assert_close(got, want)
    assert want.any(1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "num_heads is 0, expected 1 or more"),
        ((1, 6), "num_buckets is 6, expected a multiple of 4"),
        ((1, 3, 128, False), "num_buckets is 3, expected a multiple of 2"),
        ((1, 32, 8), "max_distance is 8, expected more than 8"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RelativePositionBias(*arguments)


def test_slopes_are_the_papers():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(16), 2.0 ** (-torch.arange(1, 17) / 2))
    assert alibi_slopes(1).tolist() == [2.0**-8]
    for heads in (2, 3, 6, 12, 20):
        power = max(2**n for n in range(6) if 2**n <= heads)
        want = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        want += [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
        assert alibi_slopes(heads).tolist() == pytest.approx(want)
        assert len(set(alibi_slopes(heads).tolist())) == heads
    with pytest.raises(ValueError, match="num_heads is 0"):
        alibi_slopes(0)


def test_slopes_in_attention_are_a_bias():
    q, k, v = (torch.randn(2, 6, 7, 4) for _ in range(3))
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    want = attention(q, k, v, bias=-alibi_slopes(6)[:, None, None] * distance)
    torch.testing.assert_close(attention(q, k, v, alibi=alibi_slopes(6)), want)
