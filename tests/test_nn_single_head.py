"""SingleHeadAttention against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from attnkit import masks
from attnkit.nn import SingleHeadAttention


@pytest.mark.parametrize(("d_k", "d_v"), [(None, None), (3, None), (3, 7), (1, 1)])
@pytest.mark.parametrize("cross", [False, True])
def test_equals_the_formula(d_k, d_v, cross, backend):
    module = SingleHeadAttention(5, d_k, d_v).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, 6, 5, dtype=torch.float64) if cross else None
    source = x if context is None else context
    q, k, v = (
        x @ module.query.weight.T,
        source @ module.key.weight.T,
        source @ module.value.weight.T,
    )
    want = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
    got = module(x, context)
    torch.testing.assert_close(got, want)
    assert got.shape == (2, 4, d_v or d_k or 5)
    inputs = [x, *module.parameters()]
    assert len(inputs) == 4
    for g, w in zip(
        torch.autograd.grad(got.sin().sum(), inputs),
        torch.autograd.grad(want.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(g, w)


def test_masks_mean_what_they_mean_in_functions():
    module, x = SingleHeadAttention(4), torch.randn(2, 3, 4)
    seen = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])
    got = module(x, mask=seen)
    assert not got[:, 2].any()
    torch.testing.assert_close(got[:, 0], module.value(x)[:, 0])
    torch.testing.assert_close(module(x, mask=masks.causal())[:, :2], got[:, :2])


def test_dropout_is_of_the_weights_and_in_training_only():
    module, x = SingleHeadAttention(4, dropout=0.5), torch.randn(1, 8, 4)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    assert not SingleHeadAttention(4, dropout=1.0)(x).any()


def test_what_is_wrong_is_named():
    for arguments, message in [
        ((0,), "d_model is 0, expected 1 or more"),
        ((4, 0), "d_k is 0"),
        ((4, 2, -1), "d_v is -1"),
        ((4, 2, 2, 1.5), "dropout is 1.5, expected 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            SingleHeadAttention(*arguments)
    with pytest.raises(ValueError, match=r"context has shape \(2, 3, 5\), expected \[B, L, 4\]"):
        SingleHeadAttention(4)(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))
