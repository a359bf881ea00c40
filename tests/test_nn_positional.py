"""Sinusoidal and learned positions: values, widths, layouts, positions given, lengths refused."""

import copy
import math

import pytest
import torch

from attnkit.nn import LearnedPositionalEncoding, SinusoidalPositionalEncoding

BOTH = pytest.mark.parametrize("cls", [SinusoidalPositionalEncoding, LearnedPositionalEncoding])


@pytest.mark.parametrize("d_model", [1, 2, 3, 4, 127, 128])
def test_sines_and_cosines(d_model):
    module = SinusoidalPositionalEncoding(d_model, max_len=50)
    out = module(torch.zeros(1, 50, d_model))[0]
    for p in (0, 1, 7, 49):
        for c in range(d_model):
            angle = p / 10000 ** (2 * (c // 2) / d_model)
            want = math.cos(angle) if c % 2 else math.sin(angle)
            assert out[p, c].item() == pytest.approx(want, abs=1e-7)


def test_far_positions_are_not_rounded():
    # in float32 the angle 99999 would already be wrong in the third digit of the sine
    module = SinusoidalPositionalEncoding(2, max_len=100_000)
    out = module(torch.zeros(1, 2), torch.tensor([99_999]))
    assert out[0].tolist() == pytest.approx([math.sin(99_999), math.cos(99_999)], abs=1e-7)


def test_the_table_is_no_state_and_can_be_filled_again():
    module = SinusoidalPositionalEncoding(5, max_len=7)
    assert not module.state_dict()
    assert not list(module.parameters())
    empty = SinusoidalPositionalEncoding(5, max_len=7, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.equal(empty.weight, module.weight)


def test_learned_positions_learn():
    torch.manual_seed(0)
    module = LearnedPositionalEncoding(64, max_len=100)
    assert list(module.state_dict()) == ["weight"]
    assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
    module(torch.zeros(2, 3, 64)).sum().backward()
    assert torch.equal(module.weight.grad[:3], torch.full((3, 64), 2.0))
    assert not module.weight.grad[3:].any()


@BOTH
def test_layouts(cls):
    module = cls(6, max_len=10)
    other = cls(6, max_len=10, batch_first=False)
    other.weight = copy.deepcopy(module.weight)
    x = torch.randn(3, 4, 6)
    out = module(x)
    assert torch.equal(out, x + module.weight[:4])
    assert torch.equal(other(x.transpose(0, 1)), out.transpose(0, 1))
    for unbatched in (module, other):
        assert torch.equal(unbatched(x[1]), out[1])
    assert module(x[:, :0]).shape == (3, 0, 6)
    assert module(x[:0]).shape == (0, 4, 6)


@BOTH
def test_given_positions(cls):
    module = cls(6, max_len=10)
    other = cls(6, max_len=10, batch_first=False)
    other.weight = copy.deepcopy(module.weight)
    x = torch.randn(2, 4, 6)
    left_padded = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])
    want = x + module.weight[left_padded]
    assert torch.equal(module(x, left_padded), want)
    assert torch.equal(other(x.transpose(0, 1), left_padded), want.transpose(0, 1))
    # one step of decoding, each sequence at its own length
    step = torch.tensor([[1], [9]], dtype=torch.int32)
    assert torch.equal(module(x[:, :1], step), x[:, :1] + module.weight[[1, 9]][:, None])
    shared = torch.tensor([5, 6, 7, 8])
    for positions in (shared, shared[None]):
        assert torch.equal(module(x, positions), x + module.weight[5:9])
        assert torch.equal(
            other(x.transpose(0, 1), positions).transpose(0, 1), module(x, positions)
        )
    assert torch.equal(module(x[0], shared), x[0] + module.weight[5:9])
    offsets = torch.tensor([[1], [3]])
    assert torch.equal(module(x, offsets), x + module.weight[[1, 3]][:, None])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_that_of_the_input(cls, dtype):
    x = torch.randn(2, 3, 4, dtype=dtype)
    for module in (cls(4), cls(4, dtype=dtype), cls(4).to(dtype)):
        assert module(x).dtype == dtype


@BOTH
def test_dropout_in_training_only(cls):
    module = cls(64, dropout=0.5)
    x = torch.ones(1, 8, 64)
    zeros = (module(x) == 0).double().mean()
    assert 0.3 < zeros < 0.7
    assert (module.eval()(x) != 0).any(-1).all()
    assert torch.equal(module(x), module(x))


@BOTH
def test_compiles_to_one_graph(cls):
    module = cls(6, max_len=10)
    x, positions = torch.randn(2, 4, 6), torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]])
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    assert torch.equal(compiled(x, positions), module(x, positions))


WRONG_CALLS = {
    "too long": ({"x": torch.zeros(1, 11, 6)}, ValueError, "x has length 11.*max_len = 10"),
    "width": ({"x": torch.zeros(1, 4, 5)}, ValueError, r"x has shape \(1, 4, 5\).*the last 6"),
    "rank": ({"x": torch.zeros(6)}, ValueError, r"x has shape \(6,\), expected 2 or 3 dimensions"),
    "past the end": (
        {"x": torch.zeros(1, 2, 6), "positions": torch.tensor([[3, 10]])},
        IndexError,
        "positions go from 3 to 10, expected 0 to max_len - 1 = 9",
    ),
    "negative": (
        {"x": torch.zeros(1, 2, 6), "positions": torch.tensor([[-1, 0]])},
        IndexError,
        "positions go from -1 to 0",
    ),
    "fractions": (
        {"x": torch.zeros(1, 2, 6), "positions": torch.tensor([[0.0, 1.0]])},
        TypeError,
        "positions has dtype torch.float32, expected an integer type",
    ),
    "a mask": (
        {"x": torch.zeros(1, 2, 6), "positions": torch.tensor([[True, False]])},
        TypeError,
        "positions has dtype torch.bool",
    ),
    "other length": (
        {"x": torch.zeros(3, 2, 6), "positions": torch.zeros(3, 5, dtype=torch.long)},
        ValueError,
        r"positions has shape \[3, 5\], expected \[2\] or \[3, 2\]",
    ),
    "other batch": (
        {"x": torch.zeros(1, 2, 6), "positions": torch.zeros(3, 2, dtype=torch.long)},
        ValueError,
        r"positions has shape \[3, 2\], expected \[2\] or \[1, 2\]",
    ),
    "batched for one sequence": (
        {"x": torch.zeros(2, 6), "positions": torch.zeros(1, 2, dtype=torch.long)},
        ValueError,
        r"positions has shape \[1, 2\], expected \[2\]",
    ),
}


@BOTH
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(name, cls):
    arguments, error, message = WRONG_CALLS[name]
    with pytest.raises(error, match=message):
        cls(6, max_len=10)(**arguments)


@BOTH
def test_wrong_sizes(cls):
    with pytest.raises(ValueError, match="d_model is 0, expected at least 1"):
        cls(0)
    with pytest.raises(ValueError, match="max_len is 0, expected at least 1"):
        cls(4, max_len=0)
