"""DTensors sharded over batch and heads: what each rank computes is its share of the whole."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

import attnkit
from attnkit import masks
from attnkit.integrations.torch import override_sdpa

SDPA = attnkit.scaled_dot_product_attention


@contextmanager
def rank_of(rank, sizes=(2,)):
    """A mesh as one of its ranks sees it; nothing is ever sent."""
    world = torch.Size(sizes).numel()
    init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        destroy_process_group()


def cut(t, mesh, placements):
    shape, offset = compute_local_shape_and_global_offset(t.shape, mesh, placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        t = t.narrow(dim, start, length)
    return t


def shared(t, mesh, placements):
    """A DTensor of this rank's share of t, a leaf if t is one."""
    local = cut(t.detach(), mesh, placements)
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=t.shape,
                              stride=t.stride())  # fmt: skip
    return made.requires_grad_(t.requires_grad)


LAYOUTS = {
    "batch": ((2,), (Shard(0),)),
    "heads": ((2,), (Shard(1),)),
    "both": ((2, 2), (Shard(0), Shard(1))),
    "neither": ((2,), (Replicate(),)),
}
LENGTHS = torch.tensor([5, 3, 4])
OPTIONS = {
    "nothing": {},
    "masks": {"mask": masks.sliding_window(3, 0) & masks.padding(LENGTHS)},
    "packed": {"mask": masks.documents(torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2], [0] * 5]))},
    "dense": {"mask": torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.3},
    "bias": {"bias": torch.linspace(-1, 1, 100).view(4, 5, 5)},
    "more": {"softcap": 2.0, "alibi": torch.tensor([0.1, 0.2, 0.3, 0.4]), "sinks": torch.ones(4)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_rank_has_its_share(name, layout, ran):
    sizes, placements = LAYOUTS[layout]
    q = torch.randn(3, 4, 5, 8, requires_grad=True)
    k, v = (torch.randn(3, 2, 5, 8, requires_grad=True) for _ in range(2))
    out, lse = attnkit.attention(q, k, v, return_lse=True, **OPTIONS[name])
    up = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), up)
    del ran[:]
    for rank in range(torch.Size(sizes).numel()):
        with rank_of(rank, sizes) as mesh:
            given = [shared(t, mesh, placements) for t in (q, k, v)]
            got, got_lse = attnkit.attention(*given, return_lse=True, **OPTIONS[name])
            assert isinstance(got, DTensor)
            assert got.placements == placements
            assert (got.shape, got.stride()) == (out.shape, out.stride())
            assert got_lse.shape == lse.shape
            grads = torch.autograd.grad(got, given, shared(up, mesh, placements))
            found = [got, got_lse, *grads]
            for x, y in zip(found, [out, lse, *wanted], strict=True):
                assert x.placements == placements
                torch.testing.assert_close(x.to_local(), cut(y, mesh, placements))
    assert len(ran) == 2 * torch.Size(sizes).numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sdpa(layout):
    sizes, placements = LAYOUTS[layout]
    q = torch.randn(2, 4, 5, 8)
    k = torch.randn(2, 2, 5, 8)
    for options in ({"is_causal": True}, {"attn_mask": torch.rand(2, 1, 5, 5) > 0.3}):
        want = SDPA(q, k, k, enable_gqa=True, **options)
        with rank_of(1, sizes) as mesh:
            given = [shared(t, mesh, placements) for t in (q, k, k)]
            got = SDPA(*given, enable_gqa=True, **options)
            torch.testing.assert_close(got.to_local(), cut(want, mesh, placements))


def test_gradient_of_a_bias_that_all_share_is_partial():
    q, up = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    total = torch.zeros_like(bias)
    for rank in range(2):
        with rank_of(rank) as mesh:
            given = shared(q, mesh, [Shard(0)])
            whole = shared(bias, mesh, [Replicate()])
            out = attnkit.attention(given, given, given, bias=whole)
            (g,) = torch.autograd.grad(out, whole, shared(up, mesh, [Shard(0)]))
            assert g.placements == (Partial(),)
            total += g.to_local()
    (want,) = torch.autograd.grad(attnkit.attention(q, q, q, bias=bias), bias, up)
    torch.testing.assert_close(total, want)


def test_what_would_be_wrong_is_refused():
    q = torch.randn(2, 4, 6, 8)
    with rank_of(0) as mesh:
        heads, sequence = shared(q, mesh, [Shard(1)]), shared(q, mesh, [Shard(2)])
        for function in (SDPA, attnkit.attention):
            with pytest.raises(RuntimeError, match="miss the keys of the other ranks"):
                function(sequence, sequence, sequence)
            with pytest.raises(RuntimeError, match=r"query is a float32 tensor .* a DTensor"):
                function(q, heads, heads)
            with pytest.raises(RuntimeError, match=r"key is placed as .*expected the same"):
                function(heads, shared(q, mesh, [Replicate()]), heads)
            with pytest.raises(NotImplementedError, match="dropout_p is given with DTensors"):
                function(heads, heads, heads, dropout_p=0.1)
        one = shared(torch.randn(2, 1, 6, 8), mesh, [Shard(1)])
        with pytest.raises(RuntimeError, match="key has 1 heads over 2 ranks"):
            attnkit.attention(heads, one, one)
        with pytest.raises(RuntimeError, match="bias is a plain tensor that requires a gradient"):
            attnkit.attention(heads, heads, heads, bias=torch.zeros(4, 6, 6, requires_grad=True))
        whole = shared(torch.zeros(1, 4, 6, 6), mesh, [Replicate()])
        with pytest.raises(RuntimeError, match="bias is placed as"):
            attnkit.attention(heads, heads, heads, bias=whole)
        with pytest.raises(RuntimeError, match=r"key is a DTensor, .*expected a local tensor"):
            attnkit.decode_attention(q, heads, heads, torch.tensor([6, 6], dtype=torch.int32))


def test_in_override_sdpa():
    q = torch.randn(2, 4, 6, 8)
    with rank_of(1) as mesh, override_sdpa() as calls:
        given = shared(q, mesh, [Shard(1)])
        got = torch.nn.functional.scaled_dot_product_attention(given, given, given)
        assert calls.served == 1
        torch.testing.assert_close(got.to_local(), SDPA(q, q, q)[:, 2:])
