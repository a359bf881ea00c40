"""RotaryEmbedding against complex numbers in float64, and what it promises attention."""

from __future__ import annotations

import cmath

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attnkit.nn import RotaryEmbedding

B, H, L, D = 2, 3, 5, 8
ROWS = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 7, 100, 9000]])


def truth(x, positions, rotary_dim=D, theta=10000.0, interleaved=False, stretch=1.0):
    """One pair at a time: (a + b i) e^(i p w)."""
    out, half = x.double().clone(), rotary_dim // 2
    for b, h, t in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
        p = positions[b][t]
        for i in range(half):
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            pair = complex(x[b, h, t, one], x[b, h, t, two])
            turned = pair * cmath.exp(1j * p / stretch * theta ** (-2 * i / rotary_dim))
            out[b, h, t, one], out[b, h, t, two] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4, 2])
@pytest.mark.parametrize("positions", [None, ROWS[0], ROWS], ids=["none", "[L]", "[B, L]"])
def test_equals_complex_multiplication(interleaved, rotary_dim, positions):
    x = torch.randn(B, H, L, D, dtype=torch.float64)
    rotary = RotaryEmbedding(D, rotary_dim, theta=500.0, interleaved=interleaved)
    where = (ROWS if positions is ROWS else ROWS[:1].expand(B, L)).tolist()
    want = truth(x, where, rotary_dim or D, 500.0, interleaved)
    torch.testing.assert_close(rotary(x, positions), want, rtol=1e-12, atol=1e-12)


def test_scaling_stretches_positions_or_the_lowest_frequency():
    x = torch.randn(1, 1, L, D, dtype=torch.float64)
    where = ROWS[1:].tolist()
    linear = RotaryEmbedding(D, scaling="linear", factor=4.0)
    torch.testing.assert_close(linear(x, ROWS[1:]), truth(x, where, stretch=4.0))
    ntk = RotaryEmbedding(D, scaling="ntk", factor=4.0)
    theta = 10000.0 * 4.0 ** (D / (D - 2))
    torch.testing.assert_close(ntk(x, ROWS[1:]), truth(x, where, theta=theta))
    # the highest frequency is what it was, the lowest a fourth
    (plain, _), (slow, _) = (
        m.tables(torch.tensor([1]), x.dtype) for m in (RotaryEmbedding(D), ntk)
    )
    plain, slow = plain.acos()[0], slow.acos()[0]
    torch.testing.assert_close(slow[[0, -1]], plain[[0, -1]] / torch.tensor([1.0, 4.0]))


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64)
    rotary = RotaryEmbedding(D)
    near, far = (
        (rotary(q, torch.tensor([p + 3])) * rotary(k, torch.tensor([p]))).sum() for p in (2, 5000)
    )
    torch.testing.assert_close(near, far)
    assert not torch.isclose(near, (q * k).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_once(dtype):
    x = torch.randn(B, H, L, D).to(dtype)
    out = RotaryEmbedding(D)(x, ROWS)
    assert out.dtype == dtype
    want = truth(x, ROWS.tolist())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.double(), want, rtol=eps, atol=4 * torch.finfo(torch.float32).eps
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_turns_back(interleaved):
    rotary = RotaryEmbedding(D, 4, interleaved=interleaved)
    x = torch.randn(B, 1, L, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, ROWS), x)


def test_no_state_and_one_graph_for_all_positions():
    rotary = RotaryEmbedding(D)
    assert rotary.state_dict() == {}
    assert list(rotary.buffers()) == []
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(rotary, backend=counter, fullgraph=True)
    x = torch.randn(B, H, 1, D)
    for p in range(3):
        positions = torch.full((B, 1), p)
        torch.testing.assert_close(compiled(x, positions), rotary(x, positions))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotary_dim": 3}, "rotary_dim is 3, expected an even number, 2 to dim = 8"),
        ({"rotary_dim": 10}, "rotary_dim is 10"),
        ({"rotary_dim": 0}, "rotary_dim is 0"),
        ({"scaling": "yarn"}, "scaling is 'yarn', expected None, 'linear' or 'ntk'"),
        ({"factor": 2.0}, "factor is 2.0, expected 1 or more, and 1 without scaling"),
        ({"factor": 0.5, "scaling": "linear"}, "factor is 0.5"),
        ({"rotary_dim": 2, "scaling": "ntk"}, "rotary_dim is 2, expected 4 or more"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(D, **arguments)


def test_wrong_inputs_are_named():
    rotary = RotaryEmbedding(D)
    with pytest.raises(ValueError, match=r"x has shape \(2, 5, 8\), expected \[B, H, L, 8\]"):
        rotary(torch.zeros(2, 5, 8))
    with pytest.raises(
        ValueError, match=r"positions has shape \(3, 5\), expected \[5\] or \[2, 5\]"
    ):
        rotary(torch.zeros(B, H, L, D), torch.zeros(3, 5))
