"""KVCache: what is written where, what is refused, and what a step costs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit.cache import KVCache, RingKVCache

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


@pytest.mark.parametrize("options", [{}, {"left": 2}, {"bias": True}, {"bias": True, "left": 2}])
@pytest.mark.parametrize("n", [1, 3])
def test_extend_is_append_and_attend_with_a_bias_and_a_window(n, options, backend):
    cache = filled([0, 4, 1])
    (k, v), q = tokens(3, n, 5), torch.randn(3, 2 * HEADS, n, D)
    bias = torch.randn(3, 2 * HEADS, n, CAPACITY) if options.get("bias") else None
    left = options.get("left")
    out = cache.extend(q, k, v, bias=bias, left=left)
    assert cache.lengths.tolist() == [n, 4 + n, 1 + n]
    for b, length in enumerate([n, 4 + n, 1 + n]):
        keys, values = (
            x[b, :, :length].double().repeat_interleave(2, 0) for x in (cache.k, cache.v)
        )
        scores = q[b].double() @ keys.mT / D**0.5
        if bias is not None:
            scores = scores + bias[b, :, :, :length]
        own, slots = torch.arange(length - n, length)[:, None], torch.arange(length)
        hidden = (slots > own) | (slots < own - (length if left is None else left))
        want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
        torch.testing.assert_close(out[b].double(), want, rtol=1e-5, atol=1e-5)


def test_counts_leave_padding_behind_the_length(backend):
    cache = filled([0, 3])
    (k, v), q = tokens(2, 3, 1), torch.randn(2, HEADS, 3, D)
    counts = torch.tensor([1, 3], dtype=torch.int32)
    out = cache.extend(q, k, v, counts=counts)
    assert cache.lengths.tolist() == [1, 6]
    torch.testing.assert_close(out[0, :, 0].double(), v[0, :, 0].double())
    want = truth(q[1], cache.k[1, :, :6], cache.v[1, :, :6])
    torch.testing.assert_close(out[1].double(), want, rtol=1e-5, atol=1e-6)
    k, v = tokens(2, 1, 2)
    cache.append(k, v)
    assert torch.equal(cache.k[0, :, 1], k[0, :, 0])
    assert torch.equal(cache.k[1, :, 6], k[1, :, 0])
    with pytest.raises(ValueError, match=r"counts is torch.int64 \(2,\), expected torch.int32"):
        cache.append(k, v, counts.long())
    for wrong in ([5, 1], [-1, 1]):
        with pytest.raises(ValueError, match=r"counts is .*, expected 0 to 1, the tokens"):
            cache.append(k, v, torch.tensor(wrong, dtype=torch.int32))


def test_a_cache_that_was_even_still_writes_at_the_lengths():
    """Rows of one length take another way; every method that ends it must say so."""
    one = torch.ones(2, dtype=torch.int32)
    uneven = {
        "counts": lambda c: c.append(*tokens(2, 2, 3), one.cumsum(0, dtype=torch.int32)),
        "crop": lambda c: c.crop(torch.tensor([1, 2])),
        "reorder": lambda c: (c.crop(torch.tensor([2, 1])), c.reorder(torch.tensor([1, 0]))),
        "cropped to one number": lambda c: c.crop(1),
        "cleared": lambda c: c.clear(),
    }
    for name, change in uneven.items():
        cache = KVCache.allocate(2, HEADS, CAPACITY, D, DV)
        cache.append(*tokens(2, 2, 0))
        change(cache)
        before = cache.lengths.tolist()
        k, v = tokens(2, 1, 1)
        cache.append(k, v)
        for b, length in enumerate(before):
            assert torch.equal(cache.k[b, :, length], k[b, :, 0]), name
            assert torch.equal(cache.v[b, :, length], v[b, :, 0]), name


WINDOW = 4


def pair(batch: int, capacity: int = 24) -> tuple[RingKVCache, KVCache]:
    """A ring whose slots hold NaN before they are filled, and a cache of everything."""
    ring = RingKVCache.allocate(batch, HEADS, WINDOW, D, DV)
    ring.k.fill_(torch.nan)
    ring.v.fill_(torch.nan)
    return ring, KVCache.allocate(batch, HEADS, capacity, D, DV)


def extended(cache, q, k, v, counts=None):
    left = {} if isinstance(cache, RingKVCache) else {"left": WINDOW - 1}
    return cache.extend(q, k, v, counts=counts, **left)


@pytest.mark.parametrize(
    "chunks",
    [[1] * 10, [3, 1, 1, 1], [4, 1, 1], [5, 1], [11, 1, 1, 3, 1], [2, 3, 4, 5, 1, 1], [1, 9]],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r74_a_ring_equals_a_window_over_everything(chunks, dtype, backend):
    """Step by step past the one at which it fills, and in chunks below, at and above its size."""
    ring, full = (c.like(c.k.to(dtype), c.v.to(dtype), c.capacity) for c in pair(2))
    ring.k.fill_(torch.nan)
    ring.v.fill_(torch.nan)
    for step, n in enumerate(chunks):
        q, (k, v) = torch.randn(2, 2 * HEADS, n, D).to(dtype), tokens(2, n, step, dtype)
        got, want = extended(ring, q, k, v), extended(full, q, k, v)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps)
        assert torch.equal(ring.lengths, full.lengths)
    # each slot holds the newest token that belongs there
    total = sum(chunks)
    for t in range(max(total - WINDOW, 0), total):
        assert torch.equal(ring.k[:, :, t % WINDOW], full.k[:, :, t])
        assert torch.equal(ring.v[:, :, t % WINDOW], full.v[:, :, t])


def test_r74_rows_of_different_lengths(backend):
    ring, full = pair(4)
    counts = torch.tensor([1, 4, 5, 7], dtype=torch.int32)
    for step, (n, given) in enumerate(
        [(7, counts), (1, None), (1, None), (3, counts.clamp(max=3))]
    ):
        q, (k, v) = torch.randn(4, HEADS, n, D), tokens(4, n, step)
        got, want = (extended(c, q, k, v, given) for c in (ring, full))
        for b in range(4):
            real = n if given is None else int(given[b])
            torch.testing.assert_close(got[b, :, :real], want[b, :, :real], rtol=1e-5, atol=1e-5)
    assert torch.equal(ring.lengths, full.lengths)
    ring.reorder(torch.tensor([3, 3, 0, 1, 2]))
    full.reorder(torch.tensor([3, 3, 0, 1, 2]))
    q, (k, v) = torch.randn(5, HEADS, 1, D), tokens(5, 1, 9)
    torch.testing.assert_close(extended(ring, q, k, v), extended(full, q, k, v))
    ring.reorder(torch.tensor([4, 1, 1, 0, 2]))
    full.reorder(torch.tensor([4, 1, 1, 0, 2]))
    torch.testing.assert_close(extended(ring, q, k, v), extended(full, q, k, v))


@pytest.mark.parametrize("chunks", [[1] * 11, [6, 1, 1, 2, 1], [3, 1, 1, 1, 1, 1]], ids=str)
def test_r74_left_padding_is_hidden_row_by_row(chunks, backend):
    starts = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    (ring, full), places = pair(4), torch.arange(24)
    ring = RingKVCache(ring.k, ring.v, ring.lengths, starts.clone())
    full = KVCache(full.k, full.v, full.lengths, places >= starts[:, None])
    seen = 0
    for step, n in enumerate(chunks):
        q, (k, v) = torch.randn(4, HEADS, n, D), tokens(4, n, step)
        padding = places[seen : seen + n] < starts[:, None]
        k[padding[:, None].expand(-1, HEADS, -1)] = torch.nan
        got, want = extended(ring, q, k, v), extended(full, q, k, v)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert got.isfinite().all()
        seen += n
        if step == 1:
            order = torch.tensor([1, 0, 3, 2])
            ring.reorder(order)
            full.reorder(order)
            starts = starts[order]


def test_a_ring_crops_where_nothing_was_overwritten_and_refuses_elsewhere():
    ring, full = pair(2)
    q = torch.randn(2, HEADS, 1, D)
    for cache in (ring, full):
        cache.append(*tokens(2, WINDOW, 0))
        cache.crop(torch.tensor([2, 9]))
        assert cache.lengths.tolist() == [2, WINDOW]
    torch.testing.assert_close(
        extended(ring, q, *tokens(2, 1, 1)), extended(full, q, *tokens(2, 1, 1))
    )
    before = ring.k.clone()
    with pytest.raises(ValueError, match=r"lengths is 4, .* \[3, 5\] .* the last 4.* overwritten"):
        ring.crop(4)
    assert torch.equal(ring.k, before)
    ring.crop(torch.tensor([9, 5]))  # nothing to forget
    assert ring.lengths.tolist() == [3, 5]
    with pytest.raises(ValueError, match="lengths is -1, expected 0 or more"):
        ring.crop(-1)
    ring.crop(0)
    ring.append(*tokens(2, 1, 2))
    torch.testing.assert_close(ring.attend(q)[..., 0, :], tokens(2, 1, 2)[1][:, :, 0])


def test_a_ring_refuses_what_it_cannot_answer():
    ring, _ = pair(2)
    q, (k, v) = torch.randn(2, HEADS, 2, D), tokens(2, 2, 0)
    ring.append(k, v)
    with pytest.raises(ValueError, match=r"query has 2 tokens, expected 1: .* use extend"):
        ring.attend(q)
    with pytest.raises(TypeError, match="alibi"):
        ring.attend(q[:, :, :1], alibi=torch.ones(HEADS))
    with pytest.raises(ValueError, match=r"k is \(1, 2, 2, 4\), expected \[2, 2, n, 4\]"):
        ring.extend(q, k[:1], v)
    with pytest.raises(RuntimeError, match="k requires a gradient"):
        ring.append(k.requires_grad_(), v)
    assert ring.lengths.tolist() == [2, 2]
    assert (
        repr(ring) == "RingKVCache(batch=2, heads=2, capacity=4, head_dim=4, dtype=torch.float32)"
    )


def test_steps_of_a_ring_compile_to_one_graph_and_read_nothing():
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(cache, q, k, v):
        return cache.extend(q, k, v)

    (ring, plain), q = (pair(2)[0] for _ in range(2)), torch.randn(2, HEADS, 1, D)
    for cache in (ring, plain):
        cache.append(*tokens(2, 2, 7))
    for i in range(2 * WINDOW):
        k, v = tokens(2, 1, i)
        with NoHostReads():
            want = plain.extend(q, k, v)
        torch.testing.assert_close(step(ring, q, k, v), want)
    assert counter.frame_count == 1
    with NoHostReads():
        plain.extend(torch.randn(2, HEADS, 6, D), *tokens(2, 6, 0))


@pytest.mark.parametrize("kind", [KVCache, RingKVCache])
@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        (1.5, TypeError, "lengths is float 1.5, expected an int"),
        (True, TypeError, "lengths is bool True, expected an int"),
        (torch.tensor([1.0, 1.0]), TypeError, "lengths is a float32 tensor"),
        (-1, ValueError, "lengths is -1, expected 0 or more"),
        (torch.tensor([1, 1, 1]), ValueError, r"lengths has shape \(3,\), expected \(2,\)"),
    ],
    ids=str,
)
def test_a_crop_to_something_else_is_refused(kind, lengths, error, message):
    cache = kind.allocate(2, 1, 4, 8)
    cache.append(torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 8))
    with pytest.raises(error, match=message):
        cache.crop(lengths)
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("kind", [KVCache, RingKVCache])
@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (torch.tensor([0, 2]), IndexError, r"index is \[0, 2\], expected rows from 0 to 1"),
        (torch.tensor([-1, 0]), IndexError, "expected rows from 0 to 1"),
        (torch.tensor([0.0, 1.0]), TypeError, "index is a float32 tensor"),
        (torch.tensor([[0, 1]]), ValueError, "index has shape"),
        ([0, 1], TypeError, "index is list"),
    ],
    ids=str,
)
def test_a_row_that_there_is_not_is_refused(kind, index, error, message):
    cache = kind.allocate(2, 1, 4, 8)
    cache.append(torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 8))
    before = cache.k.clone()
    with pytest.raises(error, match=message):
        cache.reorder(index)
    assert torch.equal(cache.k, before)
