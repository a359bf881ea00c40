"""attnkit.masks: what each constructor shows, how masks join, and how they are lowered."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnkit
from attnkit import masks
from attnkit.spec import BLOCK

CPU = torch.device("cpu")
B, H = 2, 3


def shown(mask: masks.Mask, lq: int, lk: int, batch: int = B, heads: int = H) -> torch.Tensor:
    """Bool [B, H, Lq, Lk] written out from the parts of the lowered mask."""
    p = mask.resolve(batch, heads, lq, lk, CPU)
    i = torch.arange(lq)[:, None] + (lk - lq if p.bottom_right else 0)
    j = torch.arange(lk)
    seen = torch.ones(batch, heads, lq, lk, dtype=torch.bool)
    if p.left is not None:
        seen &= j >= i - p.left
    if p.right is not None:
        seen &= j <= i + p.right
    if p.keep is not None:
        seen &= p.keep[:, None, None]
    if p.lengths is not None:
        seen &= j < p.lengths[:, None, None, None]
    if p.q_segments is not None:
        seen &= (p.q_segments[:, :, None] == p.k_segments[:, None])[:, None]
    if p.blocks is not None:
        wide = p.blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
        seen &= wide[:, :, :lq, :lk]
    if p.dense is not None:
        seen &= p.dense if p.dense.dtype == torch.bool else p.dense > -torch.inf
    return seen


def grid(lq: int, lk: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(lq)[:, None], torch.arange(lk)


@pytest.mark.parametrize(("lq", "lk"), [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_bands(lq, lk):
    i, j = grid(lq, lk)
    off = lk - lq
    every = torch.ones(B, H, lq, lk, dtype=torch.bool)
    assert torch.equal(shown(masks.causal(), lq, lk), every & (j <= i))
    assert torch.equal(shown(masks.causal(bottom_right=True), lq, lk), every & (j <= i + off))
    window = every & (j >= i - 2) & (j <= i + 1)
    assert torch.equal(shown(masks.sliding_window(2, 1), lq, lk), window)
    window = every & (j >= i + off - 2) & (j <= i + off + 1)
    assert torch.equal(shown(masks.sliding_window(2, 1, bottom_right=True), lq, lk), window)
    assert torch.equal(shown(masks.sliding_window(None, None), lq, lk), every)


def test_bands_stay_bands():
    mask = masks.causal() & masks.sliding_window(4, 2) & masks.sliding_window(7, None)
    assert mask.resolve(B, H, 9, 9, CPU) == (4, 0, False, *(None,) * 6)
    mask = masks.causal(bottom_right=True) & masks.sliding_window(4, 2, bottom_right=True)
    assert mask.resolve(B, H, 5, 9, CPU) == (4, 0, True, *(None,) * 6)


bound = st.none() | st.integers(0, 9)


@settings(max_examples=60, deadline=None)
@given(bound, bound, bound, bound, st.integers(1, 9), st.integers(1, 9))
def test_bands_of_both_alignments_meet_in_one(l1, r1, l2, r2, lq, lk):
    a, b = masks.sliding_window(l1, r1), masks.sliding_window(l2, r2, bottom_right=True)
    want = shown(a, lq, lk) & shown(b, lq, lk)
    for both in (a & b, b & a):
        parts = both.resolve(B, H, lq, lk, CPU)
        assert parts.dense is None
        assert torch.equal(shown(both, lq, lk), want)


def test_padding_and_keep():
    j = torch.arange(6)
    lengths = torch.tensor([2, 9])
    mask = masks.padding(lengths)
    assert mask.lengths.dtype == torch.int32
    want = torch.ones(B, H, 4, 6, dtype=torch.bool) & (j < lengths[:, None, None, None])
    assert torch.equal(shown(mask, 4, 6), want)
    shorter = mask & masks.padding(torch.tensor([5, 1]))
    assert shorter.lengths.tolist() == [2, 1]

    keep = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]]).bool()
    other = torch.tensor([1, 1, 1, 0, 0, 1]).bool()
    both = masks.key_padding(keep) & masks.key_padding(other)
    assert torch.equal(both.resolve(B, H, 4, 6, CPU).keep, keep & other)
    shared = masks.key_padding(other).resolve(B, H, 4, 6, CPU).keep
    assert shared.shape == (B, 6)
    assert shared.is_contiguous()
    everything = both & mask
    assert torch.equal(shown(everything, 4, 6), want & (keep & other)[:, None, None])


def test_documents():
    ids = torch.tensor([[0, 0, 1, 1, 2], [3, 3, 3, 7, 7]])
    k_ids = torch.tensor([0, 1, 3, 7])
    same = (ids[:, :, None] == ids[:, None])[:, None].expand(B, H, 5, 5)
    assert torch.equal(shown(masks.documents(ids), 5, 5), same)
    cross = (ids[:, :, None] == k_ids)[:, None].expand(B, H, 5, 4)
    assert torch.equal(shown(masks.documents(ids, k_ids), 5, 4), cross)
    # a second set of documents has no place among the segments
    other = torch.tensor([0, 0, 0, 1, 1])
    both = masks.documents(ids) & masks.documents(other)
    assert both.dense is not None
    assert torch.equal(shown(both, 5, 5), same & (other[:, None] == other))


def test_block_sparse():
    blocks = torch.tensor([[True, False], [False, True]])
    mask = masks.block_sparse(blocks)
    want = torch.zeros(B, H, 70, 128, dtype=torch.bool)
    want[:, :, :64, :64] = True
    want[:, :, 64:, 64:] = True
    assert torch.equal(shown(mask, 70, 128), want)
    both = mask & masks.block_sparse(torch.tensor([[True, True], [True, False]])[None, None])
    want[:, :, 64:] = False
    assert torch.equal(shown(both, 70, 128), want)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(("lq", "lk"), [(6, 6), (4, 9), (130, 200)])
def test_window_and_global_tokens(lq, lk, bottom_right):
    i, j = grid(lq, lk)
    i = i + (lk - lq if bottom_right else 0)
    n = 3
    window = masks.sliding_window(2, 1, bottom_right)
    pairs = ((j >= i - 2) & (j <= i + 1)) | (i < n) | (j < n)
    for mask in (window | masks.global_tokens(n), masks.global_tokens(n) | window):
        assert torch.equal(shown(mask, lq, lk), pairs.expand(B, H, lq, lk))
    joined = (window | masks.global_tokens(n)) & masks.causal()
    late = torch.arange(lk) > torch.arange(lq)[:, None]
    assert torch.equal(shown(joined, lq, lk), (pairs & ~late).expand(B, H, lq, lk))
    parts = joined.resolve(B, H, lq, lk, CPU)
    assert parts.right == 0
    # every block without a visible pair is marked as such
    full = torch.zeros(-(-lq // BLOCK) * BLOCK, -(-lk // BLOCK) * BLOCK, dtype=torch.bool)
    full[:lq, :lk] = pairs
    tiles = full.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)
    assert torch.equal(parts.blocks[0, 0], tiles)


def test_global_tokens_alone():
    i, j = grid(5, 7)
    want = ((i < 2) | (j < 2)).expand(B, H, 5, 7)
    assert torch.equal(shown(masks.global_tokens(2), 5, 7), want)
    assert not shown(masks.global_tokens(0), 5, 7).any()


def test_dense_parts_join():
    a, b = torch.rand(4, 6) > 0.4, torch.rand(B, 1, 4, 6) > 0.4
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(B, H, 1, 6)
    both = masks.from_dense(a) & masks.from_dense(b)
    assert torch.equal(both.dense, a & b)
    assert torch.equal((masks.from_dense(x) & masks.from_dense(y)).dense, x + y)
    for mixed in (
        masks.from_dense(a) & masks.from_dense(x),
        masks.from_dense(x) & masks.from_dense(a),
    ):
        assert torch.equal(mixed.dense[0, 0], torch.where(a, x, -torch.inf))
        assert mixed.dense.requires_grad


@pytest.mark.parametrize(
    "dense",
    [
        torch.rand(B, 1, 1, 6) > 0.5,
        (torch.rand(B, 1, 1, 6) > 0.5).expand(B, H, 4, 6),
        (torch.rand(B, 1, 1, 6) > 0.5).expand(B, 1, 4, 6),
        torch.rand(6) > 0.5,
        torch.rand(1, 6) > 0.5,
        torch.rand(B, 1, 1, 1) > 0.5,
        torch.tensor(False),
    ],
)
def test_dense_mask_that_ignores_the_query_is_a_keep_vector(dense):
    parts = masks.from_dense(dense).resolve(B, H, 4, 6, CPU)
    assert parts.dense is None
    assert parts.keep.shape == (B, 6)
    want = dense.expand(B, H, 4, 6)
    assert torch.equal(shown(masks.from_dense(dense), 4, 6), want)
    more = masks.from_dense(dense) & masks.key_padding(torch.arange(6) > 1)
    assert torch.equal(shown(more, 4, 6), want & (torch.arange(6) > 1))


@pytest.mark.parametrize(
    "dense",
    [
        torch.ones(1, H, 1, 6, dtype=torch.bool),
        torch.ones(4, 6, dtype=torch.bool),
        torch.ones(4, 1, dtype=torch.bool),
        torch.zeros(B, 1, 1, 6),
    ],
)
def test_other_dense_masks_stay_dense(dense):
    parts = masks.from_dense(dense).resolve(B, H, 4, 6, CPU)
    assert parts.keep is None
    assert parts.dense.data_ptr() == dense.data_ptr()


def test_a_mask_is_frozen_prints_itself_and_moves():
    mask = masks.causal() & masks.padding(torch.tensor([3, 4]))
    with pytest.raises(AttributeError):
        mask.start = None
    assert "int32 tensor of shape (2,)" in repr(mask)
    assert "right=0" in repr(mask)
    assert mask.to("meta").lengths.device.type == "meta"
    copy = pickle.loads(pickle.dumps(mask))
    assert torch.equal(shown(copy, 4, 4), shown(mask, 4, 4))


def test_structure_is_not_written_out(backend, ran):
    """Parts reach the backend as parts, and the result is that of the same mask written out."""
    q, k, v = torch.randn(B, H, 70, 8), torch.randn(B, H, 90, 8), torch.randn(B, H, 90, 8)
    mask = (
        (masks.sliding_window(9, 0, bottom_right=True) | masks.global_tokens(4))
        & masks.padding(torch.tensor([80, 33]))
        & masks.key_padding(torch.rand(B, 90) > 0.2)
        & masks.documents(torch.randint(0, 3, (B, 70)), torch.randint(0, 2, (B, 90)))
        & masks.block_sparse(torch.tensor([[1, 0], [1, 1]]).bool())
        & masks.causal(bottom_right=True)
    )
    got = attnkit.attention(q, k, v, mask=mask)
    want = attnkit.attention(q, k, v, mask=shown(mask, 70, 90))
    torch.testing.assert_close(got, want)
    assert ran == [f"{backend}.forward"] * 2
    dead = ~shown(mask, 70, 90).any(-1)
    assert dead.any()
    assert not got[dead].any()


def test_masks_in_a_compiled_graph():
    lengths, ids = torch.tensor([3, 5]), torch.tensor([0, 0, 1, 1, 1])

    def f(q, lengths, ids):
        mask = masks.causal() & masks.padding(lengths) & masks.documents(ids)
        return attnkit.attention(q, q, q, mask=mask)

    with attnkit.use_backend("reference"):
        q = torch.randn(B, H, 5, 8)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, lengths, ids), f(q, lengths, ids))
        ready = masks.causal() & masks.padding(lengths)
        compiled = torch.compile(
            lambda q, m: attnkit.attention(q, q, q, mask=m), fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(q, ready), attnkit.attention(q, q, q, mask=ready))


def test_numbers_of_64_bits():
    lengths = masks.padding(torch.tensor([2**31 + 5, 3, -(2**40)])).lengths
    assert lengths is not None
    assert lengths.tolist() == [2**31 - 1, 3, 0]
    with pytest.raises(ValueError, match=r"q_ids holds ids from 0 to 4294967296, .* fit in int32"):
        masks.documents(torch.tensor([2**32, 0]))
    with pytest.raises(ValueError, match="k_ids holds ids"):
        masks.documents(torch.tensor([1, 0]), torch.tensor([-(2**31) - 1, 0]))
