"""The position-wise network, beside its formula."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from attnkit.nn import FeedForward


def formula(name, h):
    if name == "swiglu":
        gate, up = h.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up
    return {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}[name](h)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["relu", "gelu", "swiglu", "tanh"])
def test_formula(name, bias):
    torch.manual_seed(0)
    activation = torch.tanh if name == "tanh" else name
    module = FeedForward(6, 10, activation, bias=bias, dtype=torch.float64)
    assert module.linear1.out_features == (20 if name == "swiglu" else 10)
    b1, b2 = (module.linear1.bias, module.linear2.bias) if bias else (0, 0)
    for shape in ((2, 3, 6), (3, 6), (6,), (0, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        hidden = formula(name, x @ module.linear1.weight.T + b1)
        torch.testing.assert_close(module(x), hidden @ module.linear2.weight.T + b2)
    assert (module.linear1.bias is None) is not bias


def test_inner_width_is_four_times_the_outer():
    assert FeedForward(6).linear1.out_features == 24
    assert FeedForward(6, activation="swiglu").linear1.out_features == 48
    assert FeedForward(6).linear2.in_features == 24


def test_dropout_is_on_the_inner_activations_in_training_only():
    module = FeedForward(4, 1000, dropout=0.5)
    seen = []
    module.linear2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.ones(4)
    module(x)
    module.eval()(x)
    alive = seen[1] != 0
    assert 0.4 < (seen[0][alive] == 0).double().mean() < 0.6
    torch.testing.assert_close(seen[0][seen[0] != 0], 2 * seen[1][seen[0] != 0])


def test_copies():
    module = FeedForward(4, activation="swiglu")
    x = torch.randn(3, 4)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    assert list(module.state_dict()) == [
        "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 0}, "d_model is 0, expected at least 1"),
        ({"d_model": 4, "d_ff": 0}, "d_ff is 0, expected at least 1"),
        (
            {"d_model": 4, "activation": "silu"},
            "activation is 'silu', expected a function or one of relu, gelu, swiglu",
        ),
    ],
)
def test_wrong_calls(arguments, message):
    with pytest.raises(ValueError, match=message):
        FeedForward(**arguments)
