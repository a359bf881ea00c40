"""KVCache: what is written where, what is refused, and what a step costs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit.cache import KVCache

HEADS, CAPACITY, D, DV = 2, 7, 4, 3


def tokens(batch: int, n: int, seed: int, dtype: torch.dtype = torch.float32):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, HEADS, n, D, generator=g).to(dtype)
    return k, torch.randn(batch, HEADS, n, DV, generator=g).to(dtype)


def filled(lengths: list[int], dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache with the given lengths whose unused slots are NaN."""
    batch = len(lengths)
    k, v = tokens(batch, CAPACITY, 99, dtype)
    cache = KVCache(k, v, torch.tensor(lengths, dtype=torch.int32))
    for b, length in enumerate(lengths):
        cache.k[b, :, length:] = torch.nan
        cache.v[b, :, length:] = torch.nan
    return cache


def truth(q, k, v, keep=None):
    """One sequence: q [Hq, n, D], the last n of k [Hkv, S, D]; float64."""
    group = q.shape[0] // k.shape[0]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(group, 0),
        v.double().repeat_interleave(group, 0),
    )
    n, s = q.shape[1], k.shape[1]
    seen = torch.ones(n, s, dtype=torch.bool).tril(s - n)
    if keep is not None:
        seen = seen & keep
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_append_writes_at_the_lengths_and_nowhere_else(n, dtype):
    cache = filled([0, 4, 2], dtype)
    before_k, before_v, address = cache.k.clone(), cache.v.clone(), cache.k.data_ptr()
    k, v = tokens(3, n, 1, dtype)
    cache.append(k, v)
    assert cache.lengths.tolist() == [n, 4 + n, 2 + n]
    for b, start in enumerate([0, 4, 2]):
        before_k[b, :, start : start + n] = k[b]
        before_v[b, :, start : start + n] = v[b]
    assert torch.equal(cache.k.nan_to_num(7.0), before_k.nan_to_num(7.0))
    assert torch.equal(cache.v.nan_to_num(7.0), before_v.nan_to_num(7.0))
    assert cache.k.data_ptr() == address


def test_append_takes_strided_views_of_one_projection():
    packed = torch.randn(2, 3, 2, HEADS, D)  # [B, n, (k, v), H, D]
    k, v = packed.permute(2, 0, 3, 1, 4)
    cache = KVCache.like(k, v, CAPACITY)
    cache.append(k, v)
    assert torch.equal(cache.k[:, :, :3], k)
    assert torch.equal(cache.v[:, :, :3], v)


@pytest.mark.parametrize("n", [1, 3])
def test_attend_is_attention_to_the_own_tokens_whatever_lies_behind(n, backend):
    cache = filled([0, 4, 1])
    cache.append(*tokens(3, n, 2))
    q = torch.randn(3, 2 * HEADS, n, D)
    out = cache.attend(q)
    for b, length in enumerate([n, 4 + n, 1 + n]):
        want = truth(q[b], cache.k[b, :, :length], cache.v[b, :, :length])
        torch.testing.assert_close(out[b].double(), want, rtol=1e-5, atol=1e-6)


def test_keep_hides_left_padding(backend):
    cache = filled([5, 5])
    keep = torch.ones(2, CAPACITY, dtype=torch.bool)
    keep[0, :2] = False
    cache = KVCache(cache.k, cache.v, cache.lengths, keep)
    q = torch.randn(2, HEADS, 1, D)
    out = cache.attend(q)
    want = truth(q[0], cache.k[0, :, 2:5], cache.v[0, :, 2:5])
    torch.testing.assert_close(out[0].double(), want, rtol=1e-5, atol=1e-6)
    cache.reorder(torch.tensor([1, 0]))
    assert cache.keep is not None
    assert cache.keep.sum(1).tolist() == [CAPACITY, CAPACITY - 2]


@pytest.mark.parametrize("lengths", [[5, 2], [7, 0], [6, 6]])
def test_r91_full_cache_is_refused_before_anything_is_written(lengths):
    cache = filled(lengths)
    before = [x.clone() for x in (cache.k, cache.v, cache.lengths)]
    with pytest.raises(
        ValueError, match=rf"full.* {max(lengths)} of {CAPACITY} tokens, and 3 more"
    ):
        cache.append(*tokens(2, 3, 3))
    for now, then in zip((cache.k, cache.v, cache.lengths), before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))
    cache.crop(4)
    cache.append(*tokens(2, 3, 3))
    assert cache.lengths.tolist() == [min(x, 4) + 3 for x in lengths]
    assert cache.attend(torch.randn(2, HEADS, 1, D)).isfinite().all()


def test_r91_a_cache_filled_step_by_step_holds_exactly_its_capacity():
    cache = KVCache.allocate(2, HEADS, CAPACITY, D, DV)
    for step in range(CAPACITY):
        cache.append(*tokens(2, 1, step))
    with pytest.raises(ValueError, match="full"):
        cache.append(*tokens(2, 1, 0))
    assert cache.lengths.tolist() == [CAPACITY] * 2


def test_the_hosts_bound_never_refuses_what_fits():
    # shortened behind the host's back (a tensor, a dropped row): it looks before it refuses
    cache = filled([6, 1])
    cache.check_room(1)
    cache.crop(torch.tensor([3, 3]))
    cache.append(*tokens(2, 3, 0))
    assert cache.lengths.tolist() == [6, 4]
    cache.reorder(torch.tensor([1, 1]))
    cache.append(*tokens(2, 3, 0))
    assert cache.lengths.tolist() == [7, 7]
    with pytest.raises(ValueError, match="full"):
        cache.append(*tokens(2, 1, 0))
    cache.clear()
    cache.append(*tokens(2, CAPACITY, 0))
    assert cache.lengths.tolist() == [CAPACITY] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_r89_cache_has_the_dtype_of_the_keys_and_refuses_another(dtype):
    k, v = tokens(2, 2, 0, dtype)
    cache = KVCache.like(k, v, CAPACITY, batch=2)
    assert (cache.k.dtype, cache.v.dtype, cache.k.shape, cache.v.shape) == (
        dtype,
        dtype,
        (2, HEADS, CAPACITY, D),
        (2, HEADS, CAPACITY, DV),
    )
    with pytest.raises(TypeError, match=rf"k is torch.float32, the cache holds {dtype}"):
        cache.append(k.float(), v)
    with pytest.raises(TypeError, match=rf"v is torch.float32, the cache holds {dtype}"):
        cache.append(k, v.float())
    assert cache.lengths.tolist() == [0, 0]
    assert not cache.k.any()
    cache.append(k, v)
    assert cache.attend(torch.randn(2, HEADS, 2, D, dtype=dtype)).dtype == dtype


def test_wrong_shapes_are_named():
    cache = filled([1, 1])
    k, v = tokens(2, 1, 0)
    for bad_k, bad_v, message in [
        (k[:1], v, r"k is \(1, 2, 1, 4\), expected \[2, 2, n, 4\]"),
        (k[:, :1], v, r"k is \(2, 1, 1, 4\)"),
        (k[0], v, r"k is \(2, 1, 4\)"),
        (k, k, r"v is \(2, 2, 1, 4\), expected \[2, 2, n, 3\]"),
        (k, v.expand(-1, -1, 2, -1), "v has 2 tokens, k has 1"),
        (k, v.to("meta"), "v is on meta, the cache is on cpu"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.append(bad_k, bad_v)
    with pytest.raises(
        ValueError, match=r"lengths is torch.int64 \(2,\), expected torch.int32 \(2,\)"
    ):
        KVCache(cache.k, cache.v, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected .* that differ in D alone"):
        KVCache(cache.k, cache.v[:, :, 1:], cache.lengths)
    with pytest.raises(
        ValueError, match=r"keep is torch.bool \(2, 3\), expected torch.bool \(2, 7\)"
    ):
        KVCache(cache.k, cache.v, cache.lengths, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="lengths is -1"):
        cache.crop(-1)


def test_a_key_that_requires_a_gradient_is_refused():
    cache = filled([1, 1])
    k, v = tokens(2, 1, 0)
    with pytest.raises(RuntimeError, match="k requires a gradient"):
        cache.append(k.requires_grad_(), v)
    with torch.no_grad():
        cache.append(k, v)
    assert not cache.k.requires_grad
    assert cache.lengths.tolist() == [2, 2]


@pytest.mark.parametrize("index", [[2, 2, 0], [1, 1, 1], [0, 1, 2]])
def test_reorder_repeats_and_drops_rows_in_place(index):
    cache = filled([3, 1, 5])
    cache.check_room(1)  # now the host knows the longest, and only that much moves
    k, v, address = cache.k.clone(), cache.v.clone(), cache.k.data_ptr()
    cache.reorder(torch.tensor(index))
    assert cache.k.data_ptr() == address
    assert cache.lengths.tolist() == [[3, 1, 5][i] for i in index]
    for b, i in enumerate(index):
        length = [3, 1, 5][i]
        assert torch.equal(cache.k[b, :, :length], k[i, :, :length])
        assert torch.equal(cache.v[b, :, :length], v[i, :, :length])


def test_reorder_to_another_batch_size():
    cache = filled([3, 1])
    k = cache.k.clone()
    cache.reorder(torch.tensor([1, 0, 0]))
    assert cache.lengths.tolist() == [1, 3, 3]
    assert torch.equal(cache.k[2, :, :3], k[0, :, :3])
    cache.append(*tokens(3, 2, 0))
    assert cache.lengths.tolist() == [3, 5, 5]


class NoHostReads(TorchDispatchMode):
    """Fails on every operator that makes the host wait for a tensor's value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return func(*args, **(kwargs or {}))


def test_steps_read_nothing_on_the_host():
    cache = KVCache.allocate(2, HEADS, CAPACITY, D, DV)
    with NoHostReads():
        for step in range(CAPACITY):
            cache.append(*tokens(2, 1, step))
            cache.reorder(torch.tensor([1, 0]))
        cache.crop(torch.tensor([2, 3]))
    with pytest.raises(AssertionError), NoHostReads():
        cache.lengths.max().item()


def test_steps_compile_to_one_graph():
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(cache, q, k, v):
        cache.append(k, v)
        return cache.attend(q)

    cache, plain = filled([0, 2]), filled([0, 2])
    cache.check_room(4)
    for i in range(4):
        q, (k, v) = torch.randn(2, HEADS, 1, D), tokens(2, 1, i)
        plain.append(k, v)
        torch.testing.assert_close(step(cache, q, k, v), plain.attend(q))
    assert counter.frame_count == 1
    assert cache.lengths.tolist() == [4, 6]
    # back outside, the cache still knows when it is full
    with pytest.raises(ValueError, match="6 of 7 tokens, and 2 more"):
        cache.append(*tokens(2, 2, 0))
