"""Paged and quantised caches: the kernels against float64, and the cache against plain lists."""

from __future__ import annotations

import math
import random
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attnkit import _slots, dispatch, testing
from attnkit.backends import cpu
from attnkit.cache import PagedKVCache
from attnkit.functional import decode_attention
from attnkit.nn import RotaryEmbedding
from attnkit.spec import AttentionSpec, CacheArgs, RotaryTables, TensorArgs

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LENGTHS = (0, 1, 7, 8, 63, 64, 65, 255, 256, 257, 300)
CAPACITY = 512


class Case(NamedTuple):
    """The same tokens [B, Hkv, CAPACITY, .] in a contiguous cache and in one of pages."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: tuple[Tensor | None, Tensor | None]
    lengths: Tensor


def build(
    lengths=LENGTHS, heads=(8, 2), dims=(40, 24), queries=1, dtype=torch.float32, stored=None
):
    """Whatever is past a length is NaN, or, in int8, has the scale NaN."""
    g = torch.Generator().manual_seed(3)
    b, (hq, hkv) = len(lengths), heads
    q = torch.randn(b, hq, queries, dims[0], generator=g).to(dtype)
    past = torch.arange(CAPACITY) >= torch.tensor(lengths)[:, None]
    tensors, scales = [], []
    for d in dims:
        t, scale = torch.randn(b, hkv, CAPACITY, d, generator=g).to(dtype), None
        if stored is None:
            t.masked_fill_(past[:, None, :, None], math.nan)
        else:
            t, scale = _slots.quantise(t, STORED[stored])
            scale.masked_fill_(past[:, None], math.nan)
        tensors.append(t)
        scales.append(scale)
    return Case(q, *tensors, tuple(scales), torch.tensor(lengths, dtype=torch.int32))


def paged(case, size, memory="heads first", past=-1):
    """The case in shuffled pages among foreign ones of NaN; what no length needs is page `past`."""
    b, width = len(case.lengths), -(-CAPACITY // size)
    g = torch.Generator().manual_seed(size)
    pages = torch.randperm(b * width + 5, generator=g)[: b * width].view(b, width)

    def scatter(t, bad):
        if t is None:
            return None
        padded = torch.full((b, t.shape[1], width * size, *t.shape[3:]), bad).to(t.dtype)
        padded[:, :, :CAPACITY] = t
        out = torch.full((b * width + 5, t.shape[1], size, *t.shape[3:]), bad).to(t.dtype)
        if memory == "slots first":
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        for i in range(b):
            for j in range(width):
                out[pages[i, j]] = padded[i, :, j * size : (j + 1) * size]
        return out

    k, v = (scatter(t, math.nan if t.dtype != torch.int8 else 1) for t in (case.k, case.v))
    scales = [scatter(t, math.nan) for t in case.scales]
    needed = torch.arange(width) < -(-case.lengths // size)[:, None]
    table = torch.where(needed, pages, past).to(torch.int32)
    return k, v, CacheArgs(None, table, None, *scales)


def decode(module, q, k, v, lengths, cache, left=None, **options):
    spec = AttentionSpec(q.shape[3] ** -0.5, left, 0, True, options.pop("softcap", 0.0))
    with testing.poisoned_memory():
        return module.decode(q, k, v, TensorArgs(lengths=lengths, **options), spec, cache)


def truth(case, starts=None, left=None):
    """float64, by definition, of what the cache holds."""
    k, v = (
        t.double() if s is None else t.double() * s.double()[..., None]
        for t, s in zip((case.k, case.v), case.scales, strict=True)
    )
    n, group = case.q.shape[2], case.q.shape[1] // case.k.shape[1]
    out = torch.zeros(*case.q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, length in enumerate(case.lengths.tolist()):
        for t in range(n):
            own = length - n + t
            first = max(0 if starts is None else int(starts[b]), 0 if left is None else own - left)
            if own < first:
                continue
            keys, values = (x[b, :, first : own + 1].repeat_interleave(group, 0) for x in (k, v))
            scores = case.q[b, :, t, None].double() @ keys.mT * case.q.shape[3] ** -0.5
            out[b, :, t] = (scores.softmax(-1) @ values)[:, 0]
    return out


@pytest.mark.isa
@pytest.mark.parametrize("size", [1, 8, 24, 64, 100, 256])
@pytest.mark.parametrize("stored", [None, *STORED])
@pytest.mark.parametrize("queries", [3, 40])  # 40 of each head in a group are many rows
def test_pages_change_no_bit(backend, size, stored, queries):
    module = dispatch.BACKENDS[backend]
    case = build(queries=queries, stored=stored)
    starts = torch.tensor([(3 * i) ** 2 % (i + 70) for i in range(len(LENGTHS))]).int()
    for memory in ("heads first", "slots first"):
        k, v, cache = paged(case, size, memory)
        for options in ({}, {"left": 70}, {"softcap": 2.0}):
            for first in (None, starts):
                whole = CacheArgs(first, None, None, *case.scales)
                want = decode(module, case.q, case.k, case.v, case.lengths, whole, **options)
                got = decode(
                    module, case.q, k, v, case.lengths, cache._replace(starts=first), **options
                )
                for x, y in zip(got, want, strict=True):
                    if backend == "reference":  # whose products depend on the capacity
                        torch.testing.assert_close(x, y)
                    else:
                        assert torch.equal(x, y)


@pytest.mark.isa
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1), (16, 2)], ids=str)
@pytest.mark.parametrize("stored", [None, *STORED])
def test_against_float64(backend, heads, stored):
    module = dispatch.BACKENDS[backend]
    starts = torch.tensor([0, 0, 3, 8, 0, 64, 1, 100, 255, 256, 299]).int()
    for dims, left, first in (
        ((64, 64), None, None),
        ((33, 79), 90, starts),
        ((8, 130), 3, starts),
    ):
        case = build(heads=heads, dims=dims, queries=2, stored=stored)
        k, v, cache = paged(case, 24)
        got, lse = decode(
            module, case.q, k, v, case.lengths, cache._replace(starts=first), left=left
        )
        want = truth(case, first, left)
        assert (got - want).abs().max() < 4e-6
        assert (lse[0] == -math.inf).all()


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", STORED)
def test_quantised_is_near(backend, dtype, stored):
    """Half a step of the largest number per value: 1/254 of it in int8, 1/28 of each in fp8."""
    exact = build(dims=(64, 64), dtype=dtype)
    case = build(dims=(64, 64), dtype=dtype, stored=stored)
    module = dispatch.BACKENDS[backend]
    cache = CacheArgs(None, None, None, *case.scales)
    got, _ = decode(module, case.q, case.k, case.v, case.lengths, cache)
    assert got.dtype == dtype
    error = (got.double() - truth(exact)).abs()
    assert error.max() < {"int8": 0.06, "fp8": 0.25}[stored]


@pytest.mark.isa
def test_left_padding_changes_no_bit(backend):
    """A sequence behind `starts` slots is the sequence alone, also for many queries."""
    if backend == "reference":
        pytest.skip("its matrix products depend on the number of columns")
    for queries in (1, 5, 120):
        case = build((300, 200, 170), queries=queries)
        alone = decode(cpu, case.q, case.k, case.v, case.lengths, CacheArgs())
        shift = torch.tensor([5, 64, 130], dtype=torch.int32)
        k, v = (torch.full_like(t, math.nan) for t in (case.k, case.v))
        for i, n in enumerate(shift.tolist()):
            k[i, :, n:], v[i, :, n:] = case.k[i, :, :-n], case.v[i, :, :-n]
        got = decode(cpu, case.q, k, v, case.lengths + shift, CacheArgs(shift))
        assert all(map(torch.equal, got, alone))


@pytest.mark.isa
def test_hidden_values_and_scales_do_not_count(backend):
    module = dispatch.BACKENDS[backend]
    for stored in (None, *STORED):
        case = build((130, 66), queries=2, stored=stored)
        keep = torch.rand(2, CAPACITY) < 0.7
        k, v, cache = paged(case, 16)
        keep = keep[:, : cache.block_table.shape[1] * 16]
        clean = decode(module, case.q, k, v, case.lengths, cache, keep=keep)
        hidden = ~keep[:, None]
        if stored is None:
            spoilt = case._replace(
                k=case.k.masked_fill(hidden[..., None], math.nan),
                v=case.v.masked_fill(hidden[..., None], math.inf),
            )
        else:
            spoilt = case._replace(
                scales=tuple(s.masked_fill(hidden, math.nan) for s in case.scales)
            )
        k, v, cache = paged(spoilt, 16)
        got = decode(module, case.q, k, v, case.lengths, cache, keep=keep)
        assert clean[0].isfinite().all()
        torch.testing.assert_close(got, clean)


@pytest.mark.isa
def test_nan_in_a_quantised_row_is_seen(backend):
    module = dispatch.BACKENDS[backend]
    case = build((90,), stored="fp8")
    v = case.v.clone()
    v[0, 1, 40, 3] = math.nan
    cache = CacheArgs(None, None, None, *case.scales)
    out, _ = decode(module, case.q, case.k, v, case.lengths, cache)
    assert out[0, 4:, :, 3].isnan().all()
    assert out[0, :4].isfinite().all()


@pytest.mark.isa
def test_every_fp8_number(backend):
    module = dispatch.BACKENDS[backend]
    x = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(256, 1, 1, 1)
    one, ones = torch.ones(256, dtype=torch.int32), torch.ones(256, 1, 1)
    for width in (1, 37):
        v = x.view(torch.int8).expand(-1, -1, -1, width).contiguous().view(x.dtype)
        k = torch.zeros_like(v, dtype=torch.float32).to(x.dtype)
        q = torch.zeros(256, 1, 1, width)
        out, _ = decode(module, q, k, v, one, CacheArgs(None, None, None, ones, ones))
        torch.testing.assert_close(out, v.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.isa
def test_batch_and_threads_change_no_bit(backend):
    if backend == "reference":
        pytest.skip("its matrix products depend on the batch")
    case = build((3, 500, 257, 300), heads=(16, 4), stored="int8", queries=2)
    k, v, cache = paged(case, 24)
    want = decode(cpu, case.q, k, v, case.lengths, cache)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, decode(cpu, case.q, k, v, case.lengths, cache), want))
    for i in range(4):
        one = cache._replace(block_table=cache.block_table[i : i + 1])
        got = decode(cpu, case.q[i : i + 1], k, v, case.lengths[i : i + 1], one)
        assert all(torch.equal(x[0], y[i]) for x, y in zip(got, want, strict=True))


@pytest.mark.isa
def test_batch_index(backend):
    module = dispatch.BACKENDS[backend]
    case = build((70, 5, 256, 90), queries=2)
    index = torch.tensor([2, 0, 2], dtype=torch.int32)
    rows = index.long()
    want = decode(module, case.q[:3], case.k[rows], case.v[rows], case.lengths[rows], CacheArgs())
    cache = CacheArgs(None, None, index)
    got = decode(module, case.q[:3], case.k, case.v, case.lengths[rows], cache)
    torch.testing.assert_close(got, want)


@pytest.mark.isa
def test_a_long_prompt_in_pages(backend):
    """More rows than the kernel holds at once."""
    case = build((300, 130), queries=130, heads=(4, 2))
    k, v, cache = paged(case, 16)
    got, _ = decode(dispatch.BACKENDS[backend], case.q, k, v, case.lengths, cache, left=100)
    assert (got - truth(case, left=100)).abs().max() < 4e-6


# ---------------------------------------------------------------- append


@pytest.mark.isa
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("stored", [None, *STORED])
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_append(backend, dtype, stored, interleaved):
    """What lies in the slots afterwards, and that nothing else has changed."""
    if stored is not None and dtype == torch.float64:
        pytest.skip("float64 is not quantised")
    module = dispatch.BACKENDS[backend]
    b, h, n, d, dv, size = 3, 2, 11, 40, 24, 8
    kept = dtype if stored is None else STORED[stored]
    k, v = torch.randn(b, h, n, d).to(dtype), torch.randn(b, n, h, dv).to(dtype).transpose(1, 2)
    k[0, 0, 3] = 0
    caches = [torch.full((20, h, size, w), 7.0).to(kept) for w in (d, dv)]
    before = [t.clone() for t in caches]
    scales = [None if stored is None else torch.full((20, h, size), 7.0) for _ in range(2)]
    table = torch.randperm(20)[:15].view(3, 5).int()
    lengths = torch.tensor([0, 7, 29], dtype=torch.int32)
    rope = RotaryEmbedding(d, 12, interleaved=interleaved)
    cos, sin = rope.tables(torch.arange(40), dtype)
    cache = CacheArgs(None, table, None, *scales)
    with testing.poisoned_memory():
        module.append(k, v, *caches, lengths, cache, RotaryTables(cos, sin, interleaved))

    slots = lengths.long()[:, None] + torch.arange(n)
    pages, rows = table.long().gather(1, slots // size), slots % size
    new = (rope(k.double(), slots), v.double())
    for t, old, scale, want in zip(caches, before, scales, new, strict=True):
        got = t.double()[pages, :, rows].transpose(1, 2)
        if scale is None:
            torch.testing.assert_close(got, want.to(dtype).double(), rtol=1e-2, atol=1e-5)
            if dtype in (torch.float32, torch.float64):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        else:
            factor = scale[pages, :, rows].transpose(1, 2)[..., None].double()
            largest = 127 if stored == "int8" else 448
            torch.testing.assert_close(factor[..., 0] * largest, want.abs().amax(-1),
                                       rtol=1e-5, atol=1e-6)  # fmt: skip
            step = (
                factor * 0.5 if stored == "int8" else (want.abs() / 16).clamp(min=factor * 2**-10)
            )
            assert ((got * factor - want).abs() <= step * 1.001 + 1e-6).all()
        untouched = torch.ones(20, size, dtype=torch.bool)
        untouched[pages, rows] = False
        a, c = (x.float().transpose(1, 2)[untouched] for x in (t, old))
        assert torch.equal(a, c)


@pytest.mark.isa
@pytest.mark.parametrize("stored", STORED)
def test_rounding(backend, stored):
    """To the nearest, ties to even; NaN and infinity spoil their row; the largest is hit."""
    module = dispatch.BACKENDS[backend]
    dtype = STORED[stored]
    largest = 127.0 if stored == "int8" else 448.0
    rows = torch.cat((torch.linspace(-largest, largest, 895), torch.arange(-127, 128) / 2,
                      torch.arange(-40, 41) / 2048, torch.zeros(1))).view(-1, 8)  # fmt: skip
    rows = torch.cat((rows, torch.full((len(rows), 1), largest)), 1)  # of scale 1
    odd = torch.tensor([[math.nan], [math.inf], [-math.inf], [0.0]]).expand(4, 9).clone()
    odd[:3, 1:] = 1.0
    x = torch.cat((rows, odd))[:, None, None]
    k, v = (torch.zeros(len(x), 1, 1, 9).to(dtype) for _ in range(2))
    scale = [torch.ones(len(x), 1, 1) for _ in range(2)]
    module.append(x, -x, k, v, torch.zeros(len(x)).int(), CacheArgs(None, None, None, *scale))
    plain = rows.round() if stored == "int8" else rows
    n = len(rows)
    assert torch.equal(k[:n, 0, 0].float(), plain.to(dtype).float())
    assert torch.equal(v[:n, 0, 0].float(), (-plain).to(dtype).float())
    assert (scale[0][:n] == 1).all()
    assert scale[0][n : n + 3].isnan().all()
    assert scale[0][n + 3] == 0
    assert (k[n + 3].float() == 0).all()


WRONG = {
    "page": ({"table": [[0, 5], [2, 3]], "lengths": [4, 4]}, "block_table"),
    "negative page": ({"table": [[0, -1], [2, 3]], "lengths": [4, 4]}, "block_table"),
    "full": ({"table": [[0, 1], [2, 3]], "lengths": [7, 4]}, "lengths|slot"),
    "negative length": ({"table": [[0, 1], [2, 3]], "lengths": [-1, 4]}, "lengths|slot"),
    "row": ({"index": [0, 5], "lengths": [0, 0]}, "batch_index"),
}


@pytest.mark.isa
@pytest.mark.parametrize(("call", "name"), WRONG.values(), ids=WRONG)
def test_slots_that_do_not_exist_are_refused(backend, call, name):
    module = dispatch.BACKENDS[backend]
    k, v = torch.zeros(5, 1, 4, 8), torch.zeros(5, 1, 4, 8)
    table, index = (
        torch.tensor(call[x], dtype=torch.int32) if x in call else None for x in ("table", "index")
    )
    lengths = torch.tensor(call["lengths"], dtype=torch.int32)
    cache = CacheArgs(None, table, index)
    new = torch.ones(2, 1, 2, 8)
    with pytest.raises(RuntimeError, match=name):
        module.append(new, new, k, v, lengths, cache)
    assert (k == 0).all()
    assert (v == 0).all()
    with pytest.raises(RuntimeError, match=name):
        decode(module, new, k, v, torch.where(lengths < 0, -1, lengths + 2), cache)


@pytest.mark.skipif(not cpu.BUILT, reason="attnkit was installed without its C++ extension")
def test_a_page_of_two_is_not_written():
    k, new = torch.zeros(5, 1, 4, 8), torch.ones(2, 1, 1, 8)
    table = torch.tensor([[0], [0]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="page 0"):
        cpu.append(new, new, k, k.clone(), torch.zeros(2).int(), CacheArgs(None, table))
    assert (k == 0).all()


def test_wrong_calls():
    case = build((5, 9), stored="int8")
    k, v, cache = paged(case, 16)
    good = {"block_table": cache.block_table, "key_scale": cache.k_scale}
    good["value_scale"] = cache.v_scale
    decode_attention(case.q, k, v, case.lengths, **good)
    ids = torch.zeros(2, dtype=torch.int32)
    for change, error, name in (
        ({"key_scale": None}, TypeError, "key_scale"),
        ({"value_scale": cache.v_scale[1:]}, RuntimeError, "value_scale"),
        ({"block_table": cache.block_table.long()}, TypeError, "block_table"),
        ({"block_table": cache.block_table[0]}, RuntimeError, "expected .*, pages of a sequence"),
        ({"batch_index": ids}, ValueError, "batch_index"),
        ({"starts": ids.long()}, TypeError, "starts"),
        ({"keep": torch.ones(2, 3, dtype=torch.bool)}, RuntimeError, "keep"),
    ):
        with pytest.raises(error, match=name):
            decode_attention(case.q, k, v, case.lengths, **{**good, **change})
    with pytest.raises(TypeError, match="query"):
        decode_attention(case.q.double(), k, v, case.lengths, **good)
    with pytest.raises(TypeError, match="cache_key"):
        decode_attention(case.q, k.float(), v, case.lengths, **good)


# ---------------------------------------------------------------- the cache


def random_walk(steps, seed):
    """add, append, fork, free, crop and reorder, against lists of what each sequence has."""
    rng = random.Random(seed)
    size, sequences, width = rng.choice((1, 3, 4)), 6, 5
    cache = PagedKVCache.allocate(14, size, 1, 1, max_sequences=sequences,
                                  max_pages_per_sequence=width)  # fmt: skip
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    model: dict[int, list[float]] = {}
    refused = 0
    for step in range(steps):
        some = rng.sample(sorted(model), rng.randint(0, len(model)))
        action = rng.choice(
            ("add", "append", "append", "append", "fork", "free", "crop", "reorder")
        )
        before = cache.k.clone(), cache.lengths.clone(), cache.block_table.clone()
        try:
            if action == "add":
                new = cache.add(rng.randint(0, 2))
                assert not set(new) & set(model)
                model.update((each, []) for each in new)
            elif action == "append":
                n = rng.randint(0, 4)
                tokens = torch.arange(len(some) * n).view(len(some), 1, n, 1) + 100.0 * step
                cache.append(tokens, -tokens, some)
                for each, row in zip(some, tokens.flatten(1).tolist(), strict=True):
                    model[each] += row
            elif action == "fork" and model:
                parent = rng.choice(sorted(model))
                for each in cache.fork(parent, rng.randint(1, 2)):
                    model[each] = list(model[parent])
            elif action == "free":
                cache.free(some[:2])
                for each in some[:2]:
                    del model[each]
            elif action == "crop":
                length = rng.randint(0, 2 * size)
                cache.crop(some[:2], length)
                for each in some[:2]:
                    del model[each][length:]
            elif action == "reorder" and some:
                parents = rng.choices(sorted(model), k=len(some))
                cache.reorder(some, parents)
                old = {each: list(tokens) for each, tokens in model.items()}
                for each, parent in zip(some, parents, strict=True):
                    model[each] = list(old[parent])
        except ValueError:
            refused += 1
            now = cache.k, cache.lengths, cache.block_table
            assert all(
                torch.equal(a.nan_to_num(-7), b.nan_to_num(-7))
                for a, b in zip(now, before, strict=True)
            )
        owners: dict[int, int] = {}
        for each, tokens in model.items():
            assert int(cache.lengths[each]) == len(tokens)
            pages = cache.block_table[each, : -(-len(tokens) // size)].tolist()
            for page in pages:
                owners[page] = owners.get(page, 0) + 1
            flat = cache.k[pages].flatten().tolist()[: len(tokens)]
            assert flat == tokens
            assert cache.v[pages].flatten().tolist()[: len(tokens)] == [-x for x in tokens]
        assert cache.free_pages == 14 - len(owners)
        free = [page for page in range(14) if page not in owners]
        cache.k[free] = cache.v[free] = math.nan
    return refused


def test_random_walks(backend):
    assert sum(random_walk(500, seed) for seed in range(4)) > 20


@pytest.mark.slow
def test_long_random_walks():
    assert sum(random_walk(10_000, seed) for seed in range(10, 20)) > 1000


def fill(cache, n, ids, seed=0):
    g = torch.Generator().manual_seed(seed)
    heads, d, dv = cache.k.shape[1], cache.k.shape[3], cache.v.shape[3]
    k, v = (torch.randn(len(ids), heads, n, x, generator=g) for x in (d, dv))
    cache.append(k, v, ids)
    return k, v


def allocate(quantize=None, **changes):
    options = {"pages": 12, "page_size": 4, "heads": 2, "head_dim": 16, "v_head_dim": 8,
               "max_sequences": 4, "max_pages_per_sequence": 6, **changes}  # fmt: skip
    return PagedKVCache.allocate(quantize=quantize, **options)


@pytest.mark.parametrize("quantize", [None, *STORED])
def test_attend_is_attention_to_all_tokens(backend, quantize):
    cache = allocate(quantize)
    ids = cache.add(2)
    parts = [fill(cache, n, ids, n) for n in (5, 1, 7)]
    k, v = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    query = torch.randn(2, 4, 3, 16)
    want = decode_attention(query, k, v, torch.tensor([13, 13]).int())
    room = {None: 1e-5, "int8": 0.05, "fp8": 0.3}[quantize]
    torch.testing.assert_close(cache.attend(query, ids), want, rtol=0, atol=room)
    twice = cache.attend(query[[0, 0]], [ids[1], ids[1]])
    assert twice.shape == want.shape


def test_what_is_wrong_changes_nothing(backend):
    cache = allocate(max_pages_per_sequence=20)
    a, b = cache.add(2)
    fill(cache, 30, [a])
    new = torch.zeros(2, 2, 30, 16), torch.zeros(2, 2, 30, 8)
    one = new[0][:1, :, :1], new[1][:1, :, :1]
    (gone,) = cache.add()
    cache.free([gone])
    before = cache.k.clone()
    for call, text in (
        (lambda: cache.append(*new, [a, b]), "full"),
        (lambda: cache.append(new[0][:, :, :1], new[1][:, :, :1], [a, a]), "twice"),
        (lambda: cache.append(*one, [gone]), "not in use"),
        (lambda: cache.append(*one, [a, b]), "expected"),
        (lambda: cache.append(*one, [a], (torch.zeros(3, 4), torch.zeros(3, 4), False)), "cos"),
        (lambda: cache.free([a, a]), "twice"),
        (lambda: cache.free([99]), "not in use"),
        (lambda: cache.fork(gone), "not in use"),
        (lambda: cache.fork(a, 3), "count"),
        (lambda: cache.crop([a], -1), "length"),
        (lambda: cache.reorder([a, b], [a]), "parents"),
        (lambda: cache.attend(torch.zeros(1, 4, 1, 16), [gone]), "not in use"),
        (lambda: allocate(quantize="int4"), "quantize"),
        (lambda: allocate(pages=0), "pages"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
        assert torch.equal(cache.k, before)
        assert (cache.free_pages, cache.lengths.tolist()[a]) == (4, 30)
    cache.append(*one, [b])
    assert cache.lengths[b] == 1


def test_copies_take_free_pages():
    """Three that share a page take two copies of it: one more than that is not asked for."""
    for free, fits in ((1, False), (2, True)):
        cache = allocate(pages=2 + free)
        (a,) = cache.add()
        fill(cache, 6, [a])
        ids = [a, *cache.fork(a, 2)]
        table = cache.block_table.clone()
        if fits:
            fill(cache, 1, ids)
            assert cache.free_pages == 0
        else:
            with pytest.raises(ValueError, match="full"):
                fill(cache, 1, ids)
            assert cache.free_pages == free
            assert torch.equal(cache.block_table, table)
            assert cache.lengths[ids].tolist() == [6, 6, 6]


def test_forks_copy_on_the_first_write(backend):
    cache = allocate()
    (a,) = cache.add()
    fill(cache, 6, [a])
    b, c = cache.fork(a, 2)
    assert cache.free_pages == 10
    k, _ = fill(cache, 1, [a, b, c], 5)
    assert cache.free_pages == 8  # the last of three writes in place
    assert len(set(cache.block_table[[a, b, c], 0].tolist())) == 1
    last = cache.block_table[[a, b, c], 1].long()
    assert torch.equal(cache.k[last, :, 2], k[:, :, 0])
    assert torch.equal(cache.k[last[0], :, :2], cache.k[last[1], :, :2])


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="no torch.compile")
def test_one_graph_for_all_steps(backend):
    """append and attend compile whole, once, and give what they give without."""
    rope = RotaryEmbedding(16)
    tables = (*rope.tables(torch.arange(24), torch.float32), False)
    graphs = 0

    def count(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    eager, compiled = allocate("int8"), allocate("int8")
    ids = [eager.add(2), compiled.add(2)][0]

    def step(cache, query, k, v):
        cache.append(k, v, ids, tables)
        return cache.attend(query, ids)

    torch.compiler.reset()
    fast = torch.compile(lambda *x: step(compiled, *x), backend=count, fullgraph=True)
    compiled.reserve(ids, 9)
    for _ in range(9):
        query, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 8)
        torch.testing.assert_close(fast(query, k, v), step(eager, query, k, v))
    assert graphs == 1
    assert compiled.lengths.tolist() == eager.lengths.tolist()
    fill(compiled, 1, ids)  # the host reads what the graph has counted
    assert compiled.lengths[ids].tolist() == [10, 10]
    compiled.crop(ids, 7)
    assert compiled.lengths[ids].tolist() == [7, 7]


@pytest.mark.skipif(not cpu.BUILT, reason="attnkit was installed without its C++ extension")
@pytest.mark.parametrize("stored", [None, "int8"])
def test_opcheck(stored):
    case = build((5, 70), queries=2, stored=stored)
    k, v, cache = paged(case, 16, past=0)
    (ks, vs), n = cache[3:], torch.zeros(2, dtype=torch.int32)
    operators = torch.ops.attnkit
    args = (*TensorArgs(lengths=case.lengths), *AttentionSpec(0.2, None, 0, True))
    torch.library.opcheck(operators.cpu_decode.default, (case.q, k, v, *args, n, *cache[1:]))
    k, v = (torch.ones_like(t) for t in (k, v))
    if stored:
        ks, vs = torch.ones_like(ks), torch.ones_like(vs)
    new = torch.randn(2, 2, 3, 40), torch.randn(2, 2, 3, 24)
    cos = torch.ones(30, 4)
    call = (*new, k, v, ks, vs, n, torch.tensor([[0], [1]]).int(), None, cos, cos, False)
    torch.library.opcheck(operators.cpu_append.default, call)


@pytest.mark.parametrize(
    ("n", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)], ids=str
)
def test_a_number_of_tokens_to_reserve_that_is_none(n, error):
    cache = PagedKVCache.allocate(4, 2, 1, 8, max_sequences=2, max_pages_per_sequence=4)
    ids = cache.add(1)
    free = cache.free_pages
    with pytest.raises(error, match="n is"):
        cache.reserve(ids, n)
    assert cache.free_pages == free
