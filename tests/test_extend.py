"""extend_attention and the caches' extend: what appending and attending one by one give."""

from __future__ import annotations

import pytest
import torch

import attnkit
from attnkit import _slots, dispatch
from attnkit.backends import cpu
from attnkit.cache import KVCache, PagedKVCache
from attnkit.nn import RotaryEmbedding
from attnkit.spec import CacheArgs, RotaryTables

B, H, HQ, D, SLOTS = 3, 2, 6, 32, 48
LENGTHS = torch.tensor([0, 7, 31], dtype=torch.int32)
pytestmark = pytest.mark.isa
needs_cpu = pytest.mark.skipif(not cpu.BUILT, reason="needs the C++ extension")
BACKENDS = [pytest.param("cpu", marks=needs_cpu), "reference"]


def tables(positions: int = SLOTS) -> RotaryTables:
    rope = RotaryEmbedding(D)
    return RotaryTables(*rope.tables(torch.arange(positions), torch.float32), rope.interleaved)


def setting(kind: str, n: int = 3, queries: int = 3, dtype: torch.dtype = torch.float32):
    """Queries, new keys and values, the cache's two tensors, and where it holds its slots."""
    torch.manual_seed(2)
    q = torch.randn(B, HQ, queries, D, dtype=dtype)
    k, v = (torch.randn(B, H, n, D, dtype=dtype) for _ in "kv")
    rows, size = (B * 4, SLOTS // 3) if kind == "paged" else (B, SLOTS)
    caches = [torch.randn(rows, H, size, D, dtype=dtype) for _ in "kv"]
    where = {}
    if kind == "paged":
        where["block_table"] = torch.randperm(rows)[: B * 3].view(B, 3).int()
    if kind == "int8":
        stored = [_slots.quantise(t, torch.int8) for t in caches]
        caches = [t for t, _ in stored]
        where |= dict(zip(("key_scale", "value_scale"), (s for _, s in stored), strict=True))
    return q, k, v, caches, where


def copied(caches, where):
    return [t.clone() for t in caches], {name: t.clone() for name, t in where.items()}


def in_two(q, k, v, caches, where, lengths, rotary, query_step, **options):
    """By an append and a decode_attention, one after the other."""
    names = ("starts", "block_table", "batch_index", "key_scale", "value_scale")
    cache = CacheArgs(*(where.get(name) for name in names))
    if query_step is not None:
        q = _slots.rotated_queries(q, lengths, query_step, rotary)
    writer = dispatch.select_append(k, v, *caches)
    writer.append(k, v, *caches, lengths, cache, rotary or RotaryTables())
    after = lengths + k.shape[2]
    return attnkit.decode_attention(q, *caches, after, **where, return_lse=True, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "paged", "int8"])
@pytest.mark.parametrize("query_step", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_is_the_two(backend, kind, query_step, dtype):
    q, k, v, caches, where = setting(kind, dtype=dtype)
    rotary = None if query_step is None else tables()
    options = {"left": 9, "softcap": 20.0}
    with attnkit.use_backend(backend):
        first, first_where = copied(caches, where)
        want = in_two(q, k, v, first, first_where, LENGTHS, rotary, query_step, **options)
        second, second_where = copied(caches, where)
        got = attnkit.extend_attention(
            q, k, v, *second, LENGTHS, **second_where, **options,
            rotary=rotary, query_step=query_step, return_lse=True,
        )  # fmt: skip
    # the operator may fuse the multiplications of a rotation, PyTorch's operations do not
    exact = query_step is None or backend == "reference"
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        limit = 0.0 if exact else 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(a, b, rtol=0, atol=limit, msg=name)
    for a, b in zip(second, first, strict=True):
        assert torch.equal(a, b)
    for name, t in second_where.items():
        assert torch.equal(t, first_where[name])
    assert not torch.equal(second[0], caches[0])


@needs_cpu
def test_the_cpu_has_one_operator_for_it(monkeypatch):
    q, k, v, caches, _ = setting("plain")
    for name in ("append", "decode"):
        monkeypatch.setattr(cpu, name, None)
    with attnkit.use_backend("cpu"):
        out = attnkit.extend_attention(q, k, v, *caches, LENGTHS)
    assert torch.equal(caches[0][0, :, :3], k[0])
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": torch.zeros(B, H, 3, D + 1)}, RuntimeError, "key has shape .* expected"),
        ({"value": torch.zeros(B, H, 2, D)}, RuntimeError, "value has shape .* expected"),
        ({"key": torch.zeros(H, 3, D)}, RuntimeError, "key has shape .* expected"),
        ({"key": torch.zeros(B, H, 3, D).double()}, TypeError, "key is .* expected torch.float32"),
        ({"value": None}, TypeError, "value is None"),
        ({"lengths": LENGTHS.long()}, TypeError, "lengths is"),
        ({"lengths": LENGTHS + SLOTS - 33}, RuntimeError, r"46 to 49|slot is 48"),
        ({"lengths": LENGTHS - 1}, RuntimeError, "-1"),
        ({"query_step": 1}, ValueError, "query_step is 1, expected"),
        ({"query_step": 2, "rotary": tables()}, ValueError, "query_step is 2, expected 0 or 1"),
        ({"left": -1}, ValueError, "left is -1"),
        ({"alibi": torch.rand(5)}, RuntimeError, "alibi has shape"),
        ({"key": torch.zeros(B, H, 3, D, requires_grad=True)}, RuntimeError, "key requires a grad"),
        ({"rotary": tables(33), "query_step": 1}, RuntimeError, "33|32"),
    ],
)
def test_a_wrong_call_writes_nothing(backend, change, error, message):
    q, k, v, caches, _ = setting("plain")
    kept = [t.clone() for t in caches]
    call = {
        "query": q, "key": k, "value": v, "cache_key": caches[0], "cache_value": caches[1],
        "lengths": LENGTHS,
    }  # fmt: skip
    with attnkit.use_backend(backend), pytest.raises(error, match=message):
        attnkit.extend_attention(**{**call, **change})
    for a, b in zip(caches, kept, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extending_a_cache_is_appending_and_attending(backend):
    caches = [KVCache.allocate(2, H, 20, D) for _ in range(2)]
    for n in (5, 1, 1, 3):
        q = torch.randn(2, HQ, n, D)
        k, v = (torch.randn(2, H, n, D) for _ in "kv")
        with attnkit.use_backend(backend):
            got = caches[0].extend(q, k, v, left=6)
            caches[1].append(k, v)
            want = caches[1].attend(q, left=6)
        assert torch.equal(got, want)
        assert torch.equal(caches[0].lengths, caches[1].lengths)
    assert torch.equal(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].v, caches[1].v)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_extending_pages_is_appending_and_attending(backend, dtype):
    torch.manual_seed(0)

    def make() -> PagedKVCache:
        kind = {"quantize": "int8"} if dtype == torch.int8 else {}
        return PagedKVCache.allocate(16, 8, H, D, max_sequences=4, max_pages_per_sequence=4, **kind)

    caches = [make() for _ in range(2)]
    ids = [cache.add(3) for cache in caches]
    for n, some in ((5, (0, 1, 2)), (1, (2, 0)), (9, (1, 2)), (1, (0, 1, 2))):
        q = torch.randn(len(some), HQ, n, D)
        k, v = (torch.randn(len(some), H, n, D) for _ in "kv")
        with attnkit.use_backend(backend):
            got = caches[0].extend(q, k, v, [ids[0][i] for i in some], rotary=tables())
            chosen = [ids[1][i] for i in some]
            caches[1].append(k, v, chosen, rotary=tables())
            want = caches[1].attend(q, chosen)
        assert torch.equal(got, want)
        assert torch.equal(caches[0].lengths, caches[1].lengths)
    with pytest.raises(ValueError, match="90 more were given"):
        caches[0].extend(*(torch.zeros(1, h, 90, D) for h in (HQ, H, H)), [ids[0][0]])
    assert torch.equal(caches[0].lengths, caches[1].lengths)


@needs_cpu
def test_operator_check():
    q, k, v, caches, where = setting("int8")
    options = (1.0, None, 0, True, 0.0, 0.0)  # scale, left, right, bottom_right, softcap, dropout_p
    args = (*caches, None, None, None, LENGTHS, *(None,) * 7, *options, None, None, None)
    scales = (where["key_scale"], where["value_scale"])
    call = (q, k, v, *args, *scales, *tables(), 1)
    torch.library.opcheck(torch.ops.attnkit.cpu_extend.default, call)
