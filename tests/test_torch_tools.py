"""What PyTorch offers around a model: compiled steps of any length, checkpoints, counters.

Single graphs, export, functorch and autograd are in test_transforms.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit import masks, nn
from attnkit.cache import PagedKVCache
from attnkit.models import Seq2SeqConfig, Seq2SeqTransformer, label_smoothed_cross_entropy

SDPA = attnkit.scaled_dot_product_attention
LENGTHS = range(3, 23)

kernels = pytest.mark.skipif(
    "cpu" not in attnkit.available_backends(), reason="the operators are those of the extension"
)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def padding(n):
    return torch.arange(n) >= torch.tensor([n, n - 1])[:, None]


# ------------------------------------------------------------- many lengths, few graphs


def made_of(name):
    """A function and what makes its arguments for a length."""
    if name == "sdpa":
        return partial(SDPA, is_causal=True), lambda n: [leaf(2, 2, n, 8) for _ in range(3)]
    if name == "mask":
        return SDPA, lambda n: [*(leaf(2, 2, n, 8) for _ in range(3)), torch.rand(n, n) > 0.2]
    if name == "structured":
        return (
            lambda q, k, v, n: attnkit.attention(
                q, k, v, mask=masks.padding(n) & masks.sliding_window(3, 0)
            ),
            lambda n: [*(leaf(2, 2, n, 8) for _ in range(3)), torch.tensor([n, n - 1])],
        )
    if name == "varlen":
        return (
            lambda q, cu: attnkit.varlen_attention(q, q, q, cu, cu, causal=True),
            lambda n: [leaf(n, 2, 8), torch.tensor([0, 2, n])],
        )
    if name == "MultiheadAttention":
        module = nn.MultiheadAttention(8, 2, batch_first=True)
        return (
            lambda x, p: module(x, x, x, key_padding_mask=p, need_weights=False)[0],
            lambda n: [leaf(2, n, 8), padding(n)],
        )
    if name == "Transformer":
        model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        return (
            lambda a, b, mask, p: model(
                a, b, tgt_mask=mask, tgt_is_causal=True, src_key_padding_mask=p
            ),
            lambda n: [
                leaf(2, n, 8),
                leaf(2, n + 1, 8),
                torch.nn.Transformer.generate_square_subsequent_mask(n + 1),
                padding(n),
            ],
        )
    raise ValueError(name)


@kernels
@pytest.mark.parametrize(
    "name",
    [
        *("sdpa", "mask", "structured", "varlen", "MultiheadAttention"),
        pytest.param("Transformer", marks=pytest.mark.slow),
    ],
)
def test_twenty_lengths_take_two_graphs(name):
    f, make = made_of(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for n in LENGTHS:
        given = make(n)
        leaves = [t for t in given if t.requires_grad]
        got, want = compiled(*given), f(*given)
        torch.testing.assert_close(got, want)
        up = torch.randn_like(want)
        for x, y in zip(
            torch.autograd.grad(got, leaves, up), torch.autograd.grad(want, leaves, up), strict=True
        ):
            torch.testing.assert_close(x, y)
    assert counter.frame_count <= 2


@kernels
@pytest.mark.slow
def test_the_training_step_of_an_encoder_decoder():
    """Batches of 20 shapes: loss and gradients of eager, one graph each, at most two recompiles."""
    torch.manual_seed(1)
    model = Seq2SeqTransformer(Seq2SeqConfig(11, 13, 16, 2, 2, 2, 24, dropout=0.0, max_length=40))

    def step(src, tgt):
        return label_smoothed_cross_entropy(model(src, tgt[:, :-1]), tgt[:, 1:])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    parameters = list(model.parameters())
    for n in LENGTHS:
        src, tgt = torch.randint(3, 11, (3, n)), torch.randint(3, 13, (3, n + 2))
        src[0, -2:] = 0
        tgt[1, -1:] = 0
        got, want = compiled(src, tgt), step(src, tgt)
        torch.testing.assert_close(got, want)
        for x, y in zip(
            torch.autograd.grad(got, parameters),
            torch.autograd.grad(want, parameters),
            strict=True,
        ):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    assert counter.frame_count <= 3


@kernels
@torch.no_grad()
def test_cached_decode_steps_share_one_graph():
    torch.manual_seed(1)
    model = Seq2SeqTransformer(Seq2SeqConfig(11, 13, 16, 2, 2, 2, 24, max_length=40)).eval()
    src = torch.randint(3, 11, (2, 6))
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.decode, fullgraph=True, backend=counter)
    one, other = (model.start(src, capacity=24) for _ in range(2))
    tokens = torch.ones(2, 1, dtype=torch.int64)
    for _ in range(20):
        got, want = step(tokens, one, last=True), model.decode(tokens, other, last=True)
        torch.testing.assert_close(got, want)
        tokens = got[:, -1:].argmax(-1)
    assert counter.frame_count == 1


# ------------------------------------------------------------- operators, by name


class Operators(TorchDispatchMode):
    """Counts attnkit's operators that really run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("attnkit."):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@kernels
@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpoints_take_the_operators(saved):
    q, k, v = (leaf(1, 2, 5, 8) for _ in range(3))

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.attnkit.cpu_forward.default and saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def f(q, k, v):
        return SDPA(q * 2, k, v, is_causal=True).square()

    want = torch.autograd.grad(f(q, k, v).sum(), (q, k, v))
    with Operators() as ran:
        out = checkpoint(
            f, q, k, v, use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )  # fmt: skip
        got = torch.autograd.grad(out.sum(), (q, k, v))
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    times = {"attnkit.cpu_forward.default": 1 if saved else 2, "attnkit.cpu_backward.default": 1}
    assert ran.counts == times


@kernels
def test_flops_are_those_of_torchs_attention():
    q, k, v = leaf(2, 4, 5, 8), leaf(2, 4, 7, 8), leaf(2, 4, 7, 8)

    def counted(f):
        with FlopCounterMode(display=False) as counter:
            f().sum().backward()
        return counter.get_total_flops()

    pairs = 2 * 4 * 5 * 7
    assert counted(lambda: SDPA(q, k, v, is_causal=True)) == pairs * 2 * (2 * 8 + 5 * 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        by_products = counted(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    recomputed = pairs * 2 * 8  # the scores, which the products keep
    assert counted(lambda: SDPA(q, k, v)) == by_products + recomputed
    assert counted(lambda: SDPA(q[:, :, :, :4], k[:, :, :, :4], v)) == pairs * 2 * (
        4 + 8 + 3 * 4 + 2 * 8
    )
    assert counted(lambda: SDPA(q, k[:, :2], v[:, :2], enable_gqa=True)) == pairs * 2 * 56


@kernels
def test_flops_of_packed_sequences_and_of_decoding():
    p, cu = torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
    with FlopCounterMode(display=False) as counter:
        attnkit.varlen_attention(p, p, p, cu, cu)
    assert counter.get_total_flops() == 2 * (4 * 4 + 5 * 5) * 2 * 16
    q, cache = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 12, 8)
    with FlopCounterMode(display=False) as counter:
        attnkit.decode_attention(q, cache, cache, torch.tensor([3, 12], dtype=torch.int32))
    assert counter.get_total_flops() == 2 * 4 * 12 * 2 * 16
    pages = PagedKVCache.allocate(6, 4, 2, 8, max_sequences=2, max_pages_per_sequence=3)
    ids = pages.add(2)
    pages.append(torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), ids)
    with FlopCounterMode(display=False) as counter:
        pages.attend(q, ids)
    assert counter.get_total_flops() % (2 * 4 * 2 * 16) == 0
    assert counter.get_total_flops() >= 2 * 4 * 5 * 2 * 16


@kernels
@pytest.mark.filterwarnings("ignore:.*profiler")
def test_the_profiler_shows_the_operators():
    q, k, v = (leaf(1, 2, 5, 8) for _ in range(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        SDPA(q, k, v).sum().backward()
    names = [event.key for event in profile.key_averages()]
    assert {"attnkit::cpu_forward", "attnkit::cpu_backward"} <= set(names)
