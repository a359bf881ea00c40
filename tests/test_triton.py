"""The Triton kernels in Triton's interpreter: every feature and pairs of them, against float64.

The interpreter takes over a process, so this file runs in one of its own: `make test` does that
with TRITON_INTERPRET=1, without which everything here is skipped.  With it the `backend` fixture
stands for the Triton kernels alone, and whole files of the other tests can be run on them:

    TRITON_INTERPRET=1 pytest tests/test_forward.py tests/test_backward.py    (half an hour)
"""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit import dispatch, testing
from attnkit._slots import quantise
from attnkit.backends import triton
from attnkit.spec import AttentionSpec, CacheArgs, TensorArgs
from attnkit.testing import Case

pytestmark = [
    pytest.mark.skipif(
        not (triton.INTERPRETED and triton.INSTALLED),
        reason="TRITON_INTERPRET=1 and an installed Triton are needed: see make test",
    ),
    pytest.mark.filterwarnings("ignore:(invalid|overflow|divide):RuntimeWarning"),
]

# One case per feature, at sizes with a full tile, a boundary and a remainder.
TINY: dict = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 37, "keys": 70, "dim": 16}
FEATURES = [
    Case("plain", **TINY),
    Case("causal", right=0, **TINY),
    Case("causal-bottom-right", right=0, bottom_right=True, **{**TINY, "heads": 4, "kv_heads": 2}),
    Case("more-queries", right=0, bottom_right=True, **{**TINY, "queries": 70, "keys": 37}),
    Case("window", left=20, right=5, **TINY),
    Case("wide-window", left=40, **{**TINY, "queries": 70}),
    Case("negative-window", left=9, right=-3, **TINY),
    Case("lengths", hide="lengths", **{**TINY, "batch": 3}),
    Case("keep", hide="keep", **TINY),
    Case("left", hide="left", right=0, **{**TINY, "batch": 2}),
    Case("segments", hide="segments", **TINY),
    Case("blocks", hide="blocks", **{**TINY, "queries": 70, "keys": 140, "heads": 1}),
    Case("bool", bias="bool:bhqk", **TINY),
    Case("bias", bias="float:bhqk", **TINY),
    Case("bias-per-head", bias="float:1hqk", **{**TINY, "batch": 2}),
    Case("bias-row", bias="float:b11k", **TINY),
    Case("bias-column", bias="float32:bhq1", **TINY),
    Case("bias-scalar", bias="float:1111", **TINY),
    Case("bias-low", bias="float:11qk", low=True, **TINY),
    Case("alibi", alibi="batch", bottom_right=True, **{**TINY, "batch": 2}),
    Case("softcap", softcap=2.0, **TINY),
    Case("sinks", sinks=True, **TINY),
    Case("sinks-without-keys", sinks=True, bias="bool:11qk", **TINY),
    Case("dropout", dropout_p=0.3, **TINY),
    Case("dropout-all", dropout_p=1.0, sinks=True, **TINY),
    Case("scale-negative", scale=-0.3, **TINY),
    Case("scale-zero", scale=0.0, right=0, **TINY),
    Case("values-wider", value_dim=40, **TINY),
    Case("values-narrower", value_dim=1, **{**TINY, "dim": 33}),
    Case("one", 1, 1, 1, 1, 1, 1),
    Case("no-keys", sinks=True, **{**TINY, "keys": 0}),
    Case("no-queries", bias="float:1hqk", **{**TINY, "queries": 0}),
    Case("no-batch", **{**TINY, "batch": 0}),
    Case("no-head-dim", value_dim=5, **{**TINY, "dim": 0}),
    Case("no-value-dim", value_dim=0, **TINY),
    *(Case(name, layout=name, **{**TINY, "batch": 2}) for name in ("transposed", "sliced",
                                                                   "inner2", "expanded")),
    Case("packed", heads=2, kv_heads=1, packed=((17, 17), (1, 40), (0, 3), (35, 35)), right=0,
         bottom_right=True, sinks=True, dropout_p=0.2),
]  # fmt: skip
PAIRS = [
    Case("causal+dropout", right=0, dropout_p=0.3, **TINY),
    Case("window+sinks+softcap", left=9, right=3, sinks=True, softcap=3.0, **TINY),
    Case("keep+bias+alibi", hide="keep", bias="float:1hqk", alibi="head", right=0, **TINY),
    Case("segments+dropout", hide="segments", dropout_p=0.2, softcap=2.0, **TINY),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# bfloat16 is upcast under the interpreter, so that a few cases show the plumbing
CHECKED = [
    (case, dtype)
    for case in FEATURES
    for dtype in (DTYPES if case.name in ("plain", "causal", "bias", "keep") else DTYPES[:2])
]


OPS = torch.ops.attnkit
if triton.INSTALLED:
    import triton.language as tl
    from attnkit.kernels import host, launch
    from attnkit.kernels.decode import decode as kernels_decode
    from attnkit.kernels.parts import narrow
    from triton import jit

    @jit
    def narrow_kernel(x, out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(out + at, narrow(tl.load(x + at), out.dtype.element_ty, "upcast"))


@pytest.fixture
def backend():
    with attnkit.use_backend("triton"):
        yield "triton"


@pytest.mark.parametrize(("case", "dtype"), CHECKED, ids=str)
def test_feature(backend, case, dtype):
    x, want = testing.expected(case, dtype)
    testing.check(testing.run(backend, x), want, case)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pair(backend, case, dtype):
    x, want = testing.expected(case, dtype)
    testing.check(testing.run(backend, x), want, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", testing.cases(), ids=str)
def test_contract(backend, case):
    """The cases of the CPU kernels, every pair of features among them."""
    x, want = testing.expected(case, torch.float32)
    testing.check(testing.run(backend, x), want, case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", testing.cases(), ids=str)
def test_contract_in_16_bits(backend, case, dtype):
    """The same, where the rounding of weights and of their gradient counts."""
    x, want = testing.expected(case, dtype)
    testing.check(testing.run(backend, x), want, case)


@pytest.mark.parametrize("name", ["pair19", "pair68"])
def test_rounding_in_narrow_heads(backend, name):
    """One row or one column, in which errors do not average out."""
    case = next(c for c in testing.cases() if c.name.startswith(name))
    x, want = testing.expected(case, torch.float16)
    testing.check(testing.run(backend, x), want, case)


def test_bfloat16_is_rounded_to_the_nearest():
    """Under the interpreter too, whose own conversion cuts off bits."""
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3e38]
    x = torch.cat([torch.randn(1016), torch.tensor(special)])
    out = torch.empty(1024, dtype=torch.bfloat16)
    narrow_kernel[(1,)](x, out, SIZE=1024)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [3, 48, 100, 256, 512])
def test_head_sizes(backend, dim):
    case = Case("", 1, 2, 1, 5, 19, dim, max(dim - 3, 1), right=4)
    x, want = testing.expected(case, torch.float16)
    testing.check(testing.run(backend, x), want, dim)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options",
    [{"right": 0}, {"hide": "keep"}, {"bias": "float:11qk", "low": True}, {"hide": "segments"}],
    ids=str,
)
def test_what_a_row_does_not_see_does_not_touch_it(backend, options, value):
    """One bad key and its value: the rows that see it may be NaN, all others keep their bits."""
    x = testing.build(Case("", **TINY, **options), torch.float32)
    clean = testing.run(backend, x)
    k, v = x.k.clone(), x.v.clone()
    k[:, :, 21] = v[:, :, 21] = value
    got = testing.run(backend, x._replace(k=k, v=v))
    spared = ~testing.visible(x)[..., 21]
    assert spared.any()
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(got, name)[spared], getattr(clean, name)[spared]), name
    if not spared.all() and math.isnan(value):
        assert got.out[~spared].isnan().all()


def test_documents_skip_the_right_tiles(backend):
    """Ids in order, so that whole tiles are hidden, and others seen in full."""
    x = testing.build(Case("", **TINY), torch.float32)
    ids = [(torch.arange(n) // 34).to(torch.int32)[None] for n in (37, 70)]
    x = x._replace(args=TensorArgs(q_segments=ids[0], k_segments=ids[1]))
    testing.check(testing.run(backend, x), testing.expect(x))


def test_rows_without_keys_pass_nothing_on(backend):
    x = testing.build(Case("", bias="bool:11qk", **TINY), torch.float32)
    dead = ~testing.visible(x).any(-1)
    assert dead.any()
    clean = testing.run(backend, x)
    spoilt = x._replace(
        q=x.q.masked_fill(dead[..., None], math.nan),
        dout=x.dout.masked_fill(dead[..., None], math.nan),
        dlse=x.dlse.masked_fill(dead, math.nan),
    )
    got = testing.run(backend, spoilt)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(clean, name)), name


@pytest.mark.parametrize("low", [-1e6, torch.finfo(torch.float32).min])
def test_rows_of_a_very_low_mask(backend, low):
    x = testing.build(Case("", **TINY), torch.float32)
    bias = torch.zeros(1, 1, 37, 70)
    bias[:, :, ::3] = low
    bias[:, :, 1::3, :64] = low
    x = x._replace(args=TensorArgs(bias=bias.expand(1, 2, 37, 70)))
    testing.check(testing.run(backend, x), testing.expect(x))


def test_the_vector_of_the_design(backend):
    """Dropout's words at seed 0x0123456789abcdef, b 3, h 5, i 2, j 4 to 7."""
    words = (0x3222F107, 0x5EAD1CA2, 0x4A79C458, 0x8C50D8E8)
    q = torch.zeros(4, 6, 3, 8)
    k, v = torch.zeros(4, 6, 8, 8), torch.eye(8).expand(4, 6, 8, 8)
    args = TensorArgs(seed=torch.tensor(0x0123456789ABCDEF))
    for word in words:
        p = (word >> 8) * 2.0**-24
        out, _ = dispatch.BACKENDS[backend].forward(q, k, v, args, AttentionSpec(1.0, dropout_p=p))
        assert (out[3, 5, 2, 4:8] != 0).tolist() == [(w >> 8) * 2.0**-24 >= p for w in words]


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), ()], ids=str)
def test_only_what_is_wanted(backend, wanted):
    case = Case("", right=20, bias="float:1hqk", sinks=True, softcap=3.0, **TINY)
    x, want = testing.expected(case, torch.float32)
    module = dispatch.BACKENDS[backend]
    out, lse = module.forward(*x[:5])
    needs = tuple(n in wanted for n in range(5))
    got = module.backward(x.dout, x.dlse, *x[:3], out, lse, x.args, x.spec, needs)
    assert tuple(g is not None for g in got) == needs
    testing.check(testing.Results(out, lse, *got), want, wanted)


def test_batch_invariance(backend):
    """A sequence's bits do not depend on what else is in the batch."""
    x = testing.build(Case("", right=0, **{**TINY, "batch": 3}), torch.float32)
    whole = testing.run(backend, x)
    alone = testing.run(backend, x._replace(**{
        name: getattr(x, name)[1:2] for name in ("q", "k", "v", "dout", "dlse")
    }))  # fmt: skip
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(whole, name)[1:2], getattr(alone, name)), name


def strided(t, how):
    """The numbers of t in other strides: every second of twice as many, or transposed."""
    if how == "transposed" and t.dim() > 1:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    return t.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("how", ["transposed", "sliced"])
@pytest.mark.parametrize("options", [
    {"hide": "lengths+keep+segments", "sinks": True, "alibi": "batch", "batch": 3, "dim": 16},
    {"hide": "blocks", "queries": 130, "keys": 140, "batch": 3, "heads": 2},
    {"packed": ((5, 9), (20, 20)), "sinks": True, "heads": 2},
], ids=["masks", "blocks", "packed"])  # fmt: skip
def test_strides_of_what_is_not_q_k_v(backend, options, how):
    x = testing.build(Case("", **options), torch.float32)
    want = testing.run(backend, x)
    args = {n: strided(t, how) for n, t in x.args._asdict().items() if t is not None and t.dim()}
    got = testing.run(backend, x._replace(args=x.args._replace(**args)))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "expanded"])
def test_tensor_descriptors(backend, layout, monkeypatch):
    """Where strides allow TMA it gives the bits of pointers; where not, nobody describes."""
    case = Case("", right=3, layout=layout, **{**TINY, "batch": 2, "dim": 20, "value_dim": 16})
    x, want = testing.expected(case, torch.float32)
    plain = testing.run(backend, x)
    monkeypatch.setattr(launch, "_INTERPRETED", launch.Config(32, 32, tma=True))
    described = []
    original = host.Call.descriptors
    monkeypatch.setattr(host.Call, "descriptors", lambda *a: described.append(original(*a)) or
                        described[-1])  # fmt: skip
    got = testing.run(backend, x)
    testing.check(got, want, layout)
    assert [d is not None for d in described] == [
        layout == "plain",
        layout in ("plain", "expanded"),
    ]
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(plain, name)), name


def test_more_packed_sequences_than_are_searched_at_once(backend, monkeypatch):
    monkeypatch.setattr(host, "_TOGETHER", 2)
    packed = ((3, 5), (0, 4), (40, 33), (1, 1), (0, 0), (35, 2), (7, 0))
    x, want = testing.expected(Case("", heads=2, packed=packed, right=0), torch.float32)
    testing.check(testing.run(backend, x), want)


OPTIONS = {
    "queries": st.sampled_from((0, 1, 2, 31, 33)), "keys": st.sampled_from((0, 1, 16, 32, 35)),
    "batch": st.integers(0, 2), "heads": st.integers(1, 2),
    "dim": st.sampled_from((0, 1, 8, 17)), "value_dim": st.sampled_from((None, 0, 1, 16)),
    "left": st.sampled_from((None, -2, 0, 9, 10**12)),
    "right": st.sampled_from((None, -1, 0, 40, 10**12)), "bottom_right": st.booleans(),
    "hide": st.sampled_from(
        ("", "lengths", "keep", "segments", "blocks", "lengths+keep+segments")
    ),
    "bias": st.sampled_from(("", "bool:bhqk", "float:1h1k", "float32:bhq1", "float:1111")),
    "alibi": st.sampled_from(("", "head", "batch")), "softcap": st.sampled_from((0.0, 2.0)),
    "sinks": st.booleans(), "dropout_p": st.sampled_from((0.0, 0.4, 1.0)),
    "scale": st.sampled_from((None, -0.3, 0.0, 3.0)),
    "layout": st.sampled_from(("plain", "transposed", "sliced", "inner2", "expanded")),
}  # fmt: skip


@hypothesis.settings(max_examples=8, deadline=None, database=None, derandomize=True)
@hypothesis.given(
    st.fixed_dictionaries({}, optional=OPTIONS),
    st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.float64)),
)
def test_a_call_that_is_not_refused_is_right(options, dtype):
    """Whatever is asked: a sentence, or the result."""
    case = Case("", **{**TINY, "queries": 33, "keys": 35, **options})
    if 0 in (case.batch, case.queries, case.keys):  # of a stretched bias nothing has one shape
        case = dataclasses.replace(case, bias="")
    x = testing.build(case, dtype)
    reason = triton.supports(*x[:5])
    assert (reason is not None) == (dtype == torch.float64), reason
    if reason is None:
        testing.check(testing.run("triton", x), testing.expect(x), case)


def test_refusals_of_sizes():
    """Of tensors that are not there: what 32-bit numbers cannot count is refused."""

    def reason(batch, heads, length, **args):
        q = torch.empty(1, 1, 1, 8).expand(batch, heads, length, 8)
        return triton.supports(q, q, q, TensorArgs(**args), AttentionSpec(1.0))

    assert reason(1, 1, 1 << 28) is None
    assert "length 268435457 is above 2^28" in reason(1, 1, (1 << 28) + 1)
    assert "programs, 2^31 or more" in reason(1 << 10, 1 << 10, 1 << 15)
    offsets = torch.empty(1, dtype=torch.int32).expand(1 << 20)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    assert reason(1, 64, 1 << 20, **packed) is None
    assert "programs, 2^31 or more" in reason(1, 1 << 11, 1 << 20, **packed)
    q, cache = torch.empty(1, 1, 1, 8), torch.empty(1, 1, 1, 8).expand(1, 1, 1 << 20, 8)
    table = torch.zeros(1, 1, dtype=torch.int32)
    for width, wrong in ((1 << 8, False), ((1 << 8) + 1, True)):
        where = CacheArgs(block_table=table.expand(1, width))
        args = TensorArgs(lengths=torch.ones(1, dtype=torch.int32))
        said = triton.supports_decode(q, cache, cache, args, AttentionSpec(1.0), where)
        assert (said is not None and "more than 2^28" in said) == wrong


# ------------------------------------------------------------- decoding


def in_cache(queries=1, lengths=(300, 0, 37), stored=None, page=None, heads=(4, 2), dims=(16, 24)):
    """q, k, v [B, Hkv, S, .] of a decoding step in float32, NaN past the lengths, and its cache.

    Returns (q, cache's k, cache's v, lengths, CacheArgs, the same k and v in float64 and in order).
    """
    g = torch.Generator().manual_seed(3)
    batch, room = len(lengths), max(lengths) + 5
    q = torch.randn(batch, heads[0], queries, dims[0], generator=g)
    size = page or room
    width = -(-room // size)
    table = torch.randperm(batch * width, generator=g).view(batch, width).to(torch.int32)
    stores, scales, plain = [], [], []
    for dim in dims:
        x = torch.randn(batch, heads[1], width * size, dim, generator=g)
        scale = None
        if stored is not None:
            x, scale = quantise(x, stored)
        real = x.double() if scale is None else x.double() * scale.double()[..., None]
        plain.append(real[:, :, :room])
        for b, length in enumerate(lengths):
            if scale is not None:
                scale[b, :, length:] = math.nan
            else:
                x[b, :, length:] = math.nan
        if page is not None:
            x, scale = (None if t is None else _in_pages(t, table, size) for t in (x, scale))
        stores.append(x)
        scales.append(scale)
    cache = CacheArgs(block_table=table if page else None, k_scale=scales[0], v_scale=scales[1])
    return q, *stores, torch.tensor(lengths, dtype=torch.int32), cache, *plain


def _in_pages(t, table, size):
    raw = t.view(torch.int8) if t.element_size() == 1 else t
    pages = torch.zeros(table.numel(), t.shape[1], size, *t.shape[3:], dtype=raw.dtype)
    for b, row in enumerate(table.tolist()):
        for n, number in enumerate(row):
            pages[number] = raw[b, :, n * size : (n + 1) * size]
    return pages.view(t.dtype)


DECODING = {
    "plain": {},
    "pages": {"page": 16},
    "odd-pages": {"page": 24},
    "int8": {"stored": torch.int8},
    "float8-pages": {"stored": torch.float8_e4m3fn, "page": 64},
    "several": {"queries": 3, "lengths": (300, 2, 37)},
    "mqa": {"heads": (7, 1)},
}


@pytest.mark.parametrize("options", DECODING.values(), ids=DECODING)
@pytest.mark.parametrize("spec", [{}, {"left": 40, "softcap": 3.0}], ids=["all", "window"])
def test_decoding(backend, options, spec):
    q, k, v, lengths, cache, k64, v64 = in_cache(**options)
    sinks = torch.linspace(-1, 1, q.shape[1]) if spec else None
    how = AttentionSpec(0.25, right=0, bottom_right=True, **spec)
    args = TensorArgs(lengths=lengths, sinks=sinks)
    module = dispatch.BACKENDS[backend]
    assert module.supports_decode(q, k, v, args, how, cache) is None
    with testing.poisoned_memory():
        out, lse = module.decode(q, k, v, args, how, cache)
    args = args._replace(sinks=None if sinks is None else sinks.double())
    want = dispatch.BACKENDS["reference"].decode(q.double(), k64, v64, args, how)
    torch.testing.assert_close(out.double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=1e-5)


def test_room_changes_no_bit_of_decoding(backend):
    """However much of the cache is left, and whatever it holds."""
    how = AttentionSpec(0.25, right=0, bottom_right=True)
    q, k, v, lengths, _cache, *_ = in_cache()
    wide = [torch.cat([t, torch.full_like(t, math.nan)], 2) for t in (k, v)]
    args = TensorArgs(lengths=lengths)
    small, large = (dispatch.BACKENDS[backend].decode(q, *kv, args, how) for kv in ((k, v), wide))
    assert torch.equal(small[0], large[0])
    assert torch.equal(small[1], large[1])


@pytest.mark.parametrize("queries", [1, 3])
def test_nothing_before_the_window_of_a_decoding_step_is_read(backend, queries):
    """Those keys may be gone: NaN in their slots, no page in the table."""
    q, k, v, lengths, cache, k64, v64 = in_cache(lengths=(300, 37), queries=queries, page=8)
    table = cache.block_table.clone()
    for b, length in enumerate(lengths.tolist()):
        before = length - queries - 10  # of the first query, which sees 10 keys before its own
        for slot in range(before):
            page = table[b, slot // 8].item()
            k[page, :, slot % 8] = v[page, :, slot % 8] = math.nan
        table[b, : before // 8] = -1
    how = AttentionSpec(0.25, left=10, right=0, bottom_right=True)
    args = TensorArgs(lengths=lengths)
    cache = cache._replace(block_table=table)
    out, lse = dispatch.BACKENDS[backend].decode(q, k, v, args, how, cache)
    want = dispatch.BACKENDS["reference"].decode(q.double(), k64, v64, args, how)
    torch.testing.assert_close(out.double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("change", "text"), [
    ({"lengths": 326}, "lengths is 326, expected 0 to 325"),
    ({"lengths": -1}, "lengths is -1, expected 0 to 325"),
    ({"page": -1}, "block_table is -1, expected 0 to 25"),
    ({"page": 26}, "block_table is 26, expected 0 to 25"),
    ({"row": 3}, "batch_index is 3, expected 0 to 2"),
    ({"row": -1}, "batch_index is -1, expected 0 to 2"),
], ids=str)  # fmt: skip
def test_places_that_a_cache_does_not_have(backend, change, text):
    """They are refused on the host; the kernel, on a GPU alone with them, reads nothing there."""
    page = None if "row" in change else 25
    q, k, v, lengths, cache, *_ = in_cache(lengths=(300, 37), page=page)
    if "row" in change:
        k, v = (t[[0, 1, 0]] for t in (k, v))
        cache = cache._replace(batch_index=torch.tensor([0, change["row"]], dtype=torch.int32))
    if "page" in change:
        cache.block_table[1, 1] = change["page"]
    lengths[0] = change.get("lengths", 300)
    how = AttentionSpec(0.25, right=0, bottom_right=True)
    arguments = (q, k, v, TensorArgs(lengths=lengths), how, cache)
    with pytest.raises(RuntimeError, match=text):
        triton.decode(*arguments)
    _, lse = kernels_decode(*arguments)  # in the interpreter, where it does not end
    wrong = 0 if "lengths" in change else 1
    assert (lse[wrong] == -math.inf).all()
    assert lse[1 - wrong].isfinite().all()


def test_places_that_nobody_looks_at_may_be_anything(backend):
    """Pages past a length, before its start or its window; rows of empty sequences."""
    q, k, v, lengths, cache, k64, v64 = in_cache(lengths=(300, 37), page=25)
    cache.block_table[0, 0] = cache.block_table[1, 2:] = 99
    starts = torch.tensor([25, 0], dtype=torch.int32)
    how = AttentionSpec(0.25, right=0, bottom_right=True)
    args = TensorArgs(lengths=lengths)
    got = triton.decode(q, k, v, args, how, cache._replace(starts=starts))
    there = CacheArgs(starts=starts)
    want = dispatch.BACKENDS["reference"].decode(q.double(), k64, v64, args, how, there)
    torch.testing.assert_close(got[0].double(), want[0], atol=1e-5, rtol=1e-5)


def test_scales_of_a_cache_may_be_negative(backend):
    q, k, v, lengths, cache, k64, v64 = in_cache(stored=torch.int8)
    cache = cache._replace(k_scale=-cache.k_scale, v_scale=-cache.v_scale)
    how = AttentionSpec(0.25, right=0, bottom_right=True)
    args = TensorArgs(lengths=lengths)
    out, _lse = dispatch.BACKENDS[backend].decode(q, k, v, args, how, cache)
    want = dispatch.BACKENDS["reference"].decode(q.double(), -k64, -v64, args, how)
    torch.testing.assert_close(out.double(), want[0], atol=1e-5, rtol=1e-5)


def test_decoding_by_operator():
    q, k, v, lengths, cache, *_ = in_cache(page=16, stored=torch.int8, lengths=(20, 9))
    args = TensorArgs(lengths=lengths)
    how = AttentionSpec(0.25, right=0, bottom_right=True)
    torch.library.opcheck(OPS.triton_decode.default, (q, k, v, *args, *how, *cache))


# ------------------------------------------------------------- the way of a call


def test_the_public_function_runs_on_it(backend, ran):
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    attnkit.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert ran == ["triton.forward", "triton.backward"]


@pytest.mark.parametrize(
    ("dim", "dtype", "word"),
    [(16, torch.float64, "float64"), (520, torch.float32, "head dim 520 is above 512")],
)
def test_refusals_are_sentences(dim, dtype, word):
    q = torch.zeros(1, 1, 2, dim, dtype=dtype)
    answer = attnkit.explain(q, q, q)
    assert word in (answer["triton"] or "")
    with attnkit.use_backend("triton"), pytest.raises(NotImplementedError, match=word):
        attnkit.scaled_dot_product_attention(q, q, q)


CALLS = [
    Case("plain", **TINY),
    Case("everything", 1, 2, 1, 37, 70, 16, 24, left=30, right=5, bottom_right=True,
         hide="lengths+keep+segments+blocks", bias="float:1hqk", alibi="batch", softcap=3.0,
         sinks=True, dropout_p=0.2, layout="transposed"),
    Case("packed", heads=2, packed=((5, 9), (0, 3), (20, 20)), right=0, bottom_right=True),
    Case("no-queries", bias="float:bhqk", **{**TINY, "queries": 0}),
]  # fmt: skip


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_operators(case):
    """Schema, fakes and autograd registration, by torch's own opcheck."""
    x = testing.build(case, torch.float32)
    torch.library.opcheck(OPS.triton_forward.default, (*x[:3], *x.args, *x.spec))
    out, lse = triton.forward(*x[:5])
    needs = (True, True, True, x.args.bias is not None, x.args.sinks is not None)
    arguments = (x.dout, x.dlse, *x[:3], out, lse, *x.args, *x.spec, *needs)
    torch.library.opcheck(OPS.triton_backward.default, arguments)


def test_modes_see_operators(backend):
    """Flop counters, checkpoint policies and fake tensors are told of a call outside a graph."""
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        attnkit.attention(q, q, q).sum().backward()
    product = 2 * 2 * 20 * 20 * 16
    assert counter.get_total_flops() == (2 + 5) * product
    with FakeTensorMode():
        fake = torch.empty(1, 2, 20, 16)
        assert attnkit.attention(fake, fake, fake).shape == q.shape


def test_a_model_compiles_to_one_graph(backend):
    """Forward and backward, the bits of the eager call."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.inner(x).view(1, 20, 3, 1, 16).permute(2, 0, 3, 1, 4).unbind(0)
            return attnkit.scaled_dot_product_attention(q, k, v, is_causal=True)

    model, x = Model(), torch.randn(1, 20, 16)
    eager = model(x)
    eager.sum().backward()
    want = model.inner.weight.grad.clone()
    model.inner.weight.grad = None
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(x)
    got.sum().backward()
    assert torch.equal(got, eager)
    torch.testing.assert_close(model.inner.weight.grad, want)
