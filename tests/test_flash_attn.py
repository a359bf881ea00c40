"""flash-attn's functions by its own contract, beside plain formulas in float64."""

from __future__ import annotations

import pytest
import torch

from attnkit import flash_attn, testing
from attnkit.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    pad_input,
    unpad_input,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ERROR = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


def plain(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, alibi=None):
    """Of one sequence: q [Lq, H, D], k, v [Lk, Hkv, D] to out [Lq, H, Dv] and lse [H, Lq]."""
    q, k, v = (t.double() for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - len(k) + len(q)
    if alibi is not None:
        s = s - alibi.double()[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    if left >= 0:
        s = s.masked_fill(distance < -left, -torch.inf)
    if right >= 0:
        s = s.masked_fill(distance > right, -torch.inf)
    lse = s.logsumexp(-1)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, (s - lse[..., None]).exp())
    return torch.einsum("hqk,khd->qhd", weights.nan_to_num(), v), lse


def random(*shape, dtype=torch.float32, grad=False):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def close(found, expected, dtype):
    torch.testing.assert_close(
        found.double(), expected.double(), atol=ERROR[dtype], rtol=ERROR[dtype]
    )


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (5, 3)},
    {"window_size": (-1, 2)},
    {"causal": True, "window_size": (4, 9)},
    {"softcap": 5.0},
    {"softmax_scale": 0.2, "causal": True},
    {"alibi": True},
    {"alibi": True, "causal": True, "window_size": (7, -1)},
]


def both_ways(options, heads):
    """The options for flash-attn's functions, and for `plain`."""
    slopes = torch.rand(heads) if options.get("alibi") else None
    theirs = {name: value for name, value in options.items() if name != "alibi"}
    names = {"softmax_scale": "scale", "window_size": "window"}
    ours = {names.get(name, name): value for name, value in theirs.items()}
    return {**theirs, "alibi_slopes": slopes}, {**ours, "alibi": slopes}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("lq", "lk"), [(13, 13), (5, 20), (20, 5)])
def test_func_and_gradients(dtype, options, lq, lk):
    given, wanted = both_ways(options, 4)
    q, k, v = (random(2, n, h, 16, dtype=dtype, grad=True) for n, h in ((lq, 4), (lk, 2), (lk, 2)))
    with testing.recorded_backends() as ran:
        out, lse, weights = flash_attn_func(q, k, v, **given, return_attn_probs=True)
    assert set(ran) == {"cpu.forward"}
    assert weights.numel() == 0
    by_hand = [plain(q[b], k[b], v[b], **wanted) for b in range(2)]
    close(out, torch.stack([one[0] for one in by_hand]), dtype)
    close(lse, torch.stack([one[1] for one in by_hand]), dtype)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    expected = torch.autograd.grad(
        torch.stack([one[0] for one in by_hand]), (q, k, v), upstream.double()
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=20 * ERROR[dtype], rtol=20 * ERROR[dtype])


def test_packed_forms_are_the_same():
    qkv, kv, q = random(2, 7, 3, 4, 8), random(2, 9, 2, 2, 8), random(2, 7, 4, 8)
    options = {"causal": True, "window_size": (3, 0)}
    expected = flash_attn_func(*qkv.unbind(2), **options)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **options), expected)
    expected = flash_attn_func(q, *kv.unbind(2), **options)
    assert torch.equal(flash_attn_kvpacked_func(q, kv, **options), expected)


def test_dropout_weights_belong_to_the_output():
    q, k, v = (random(1, 6, 2, 8) for _ in range(3))
    torch.manual_seed(3)
    out, _, weights = flash_attn_func(q, k, v, dropout_p=0.4, return_attn_probs=True)
    assert 0 < int((weights == 0).sum()) < weights.numel()
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", weights, v))


LENGTHS_Q, LENGTHS_K = [3, 0, 8, 1], [5, 4, 0, 1]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_varlen_with_empty_sequences(options, paged):
    given, wanted = both_ways(options, 4)
    q, k, v = random(12, 4, 16), random(10, 2, 16), random(10, 2, 16)
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    keys, values, table = k, v, None
    if paged:
        table = torch.tensor([[6, 1], [3, 0], [9, 9], [2, 9]], dtype=torch.int32)
        keys, values = torch.full((2, 7, 4, 2, 16), torch.nan)
        for n, length in enumerate(LENGTHS_K):
            for j in range(length):
                page, row = int(table[n, j // 4]), j % 4
                keys[page, row], values[page, row] = k[cu_k[n] + j], v[cu_k[n] + j]
    out, lse, _ = flash_attn_varlen_func(
        q, keys, values, cu_q, cu_k, 8, 5, **given, return_attn_probs=True, block_table=table
    )
    for n in range(4):
        rows, columns = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        expected, expected_lse = plain(q[rows], k[columns], v[columns], **wanted)
        close(out[rows], expected, torch.float32)
        close(lse[:, rows], expected_lse, torch.float32)


def test_varlen_packed_forms_are_the_same():
    qkv, cu = random(10, 3, 2, 8), offsets(LENGTHS_K)
    expected = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 5, 5, causal=True)
    found = flash_attn_varlen_qkvpacked_func(qkv, cu, 5, causal=True)
    assert torch.equal(found, expected)
    kv = qkv[:, 1:].contiguous()
    found = flash_attn_varlen_kvpacked_func(qkv[:, 0], kv, cu, cu, 5, 5, causal=True)
    assert torch.equal(found, expected)


def rotated(x, cos, sin, positions, interleaved):
    """x [L, H, D] in float64, by complex numbers."""
    half = cos.shape[1]
    turn = torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    head, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).mT
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return torch.cat([(pairs if interleaved else pairs.mT).flatten(-2), rest], dim=-1)


CACHES = [
    (torch.float32, where, rotary)
    for where in ("rows", "index", "leftpad", "pages")
    for rotary in (None, "interleaved", "half")
] + [
    (dtype, where, rotary)
    for dtype in (torch.float16, torch.bfloat16)
    for where, rotary in (("rows", None), ("leftpad", "interleaved"), ("pages", "half"))
]


@pytest.mark.parametrize(("dtype", "where", "rotary"), CACHES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kvcache(dtype, options, where, rotary):
    given, wanted = both_ways(options, 4)
    held, new = [9, 2, 0], 3
    q, k, v = random(3, new, 4, 16, dtype=dtype), *random(2, 3, new, 2, 16, dtype=dtype)
    old = random(2, 3, 9, 2, 16, dtype=dtype)
    starts, extra = [0, 0, 0], {}
    if where == "pages":
        caches = torch.full((2, 12, 4, 2, 16), torch.nan, dtype=dtype)
        table = torch.randperm(12).view(3, 4).int()
        extra = {"block_table": table}
        places = [[(int(table[b, j // 4]), j % 4) for j in range(12)] for b in range(3)]
    else:
        rows = [4, 1, 3] if where == "index" else [0, 1, 2]
        if where == "index":
            extra = {"cache_batch_idx": torch.tensor(rows, dtype=torch.int32)}
        if where == "leftpad":
            starts = [4, 0, 0]
            extra = {"cache_leftpad": torch.tensor(starts, dtype=torch.int32)}
        caches = torch.full((2, 5, 14, 2, 16), torch.nan, dtype=dtype)
        places = [[(rows[b], j) for j in range(12)] for b in range(3)]
    for b, count in enumerate(held):
        for j in range(starts[b], count):
            caches[:, places[b][j][0], places[b][j][1]] = old[:, b, j]
    before = caches.clone()
    turned = {}
    queries, keys = q.double(), k.double()
    if rotary:
        cos, sin = torch.rand(2, 20, 4).to(dtype)
        interleaved = rotary == "interleaved"
        turned = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        local = given.get("causal") or given.get("window_size", (-1, -1)) != (-1, -1)
        steps = torch.arange(new)
        queries, keys = (
            torch.stack([rotated(x[b], cos, sin, held[b] + each, interleaved) for b in range(3)])
            for x, each in ((q, steps if local else 0 * steps), (k, steps))
        )
    out, lse = flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=torch.tensor(held, dtype=torch.int32),
        return_softmax_lse=True,
        **given,
        **turned,
        **extra,
    )
    written = torch.zeros(caches.shape[1:3], dtype=torch.bool)
    for b, count in enumerate(held):
        span = slice(starts[b], count)
        all_keys = torch.cat([old[0, b, span].double(), keys[b].to(dtype).double()])
        all_values = torch.cat([old[1, b, span], v[b]])
        expected, expected_lse = plain(queries[b], all_keys, all_values, **wanted)
        tolerance = 3 * ERROR[dtype]
        torch.testing.assert_close(out[b].double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[b].double(), expected_lse, atol=tolerance, rtol=tolerance)
        for step in range(new):
            row, slot = places[b][count + step]
            written[row, slot] = True
            close(caches[0, row, slot], keys[b, step], dtype)
            assert torch.equal(caches[1, row, slot], v[b, step])
    torch.testing.assert_close(caches[:, ~written], before[:, ~written], equal_nan=True)


def test_kvcache_without_new_keys():
    q, k, v = random(2, 1, 4, 8), random(2, 6, 2, 8), random(2, 6, 2, 8)
    expected = flash_attn_func(q, k, v)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v), expected)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, cache_seqlens=6), expected)
    torch.testing.assert_close(
        flash_attn_with_kvcache(q, k, v, cache_seqlens=4), flash_attn_func(q, k[:, :4], v[:, :4])
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": None}, ValueError, "k and v are given one without the other"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens is missing"),
        ({"rotary_cos": torch.ones(9, 4)}, ValueError, "rotary_sin belong together"),
        (
            {"rotary_cos": torch.ones(9, 5), "rotary_sin": torch.ones(9, 5)},
            RuntimeError,
            "rotary_cos has shape",
        ),
        (
            {"rotary_cos": torch.ones(4, 4), "rotary_sin": torch.ones(4, 4), "causal": True},
            RuntimeError,
            "rotary_cos has 4 positions",
        ),
        ({"cache_seqlens": torch.tensor([4, 6])}, TypeError, "cache_seqlens is"),
        ({"cache_seqlens": torch.tensor([4, 7]).int()}, RuntimeError, "full"),
        ({"window_size": (-2, 0)}, ValueError, "window is"),
        ({"alibi_slopes": torch.rand(3)}, RuntimeError, "alibi"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"cache_batch_idx": torch.tensor([0, 9]).int()}, RuntimeError, "9"),
        (
            {"cache_leftpad": torch.zeros(2).int(), "block_table": torch.zeros(2, 2).int()},
            ValueError,
            "cache_leftpad and block_table",
        ),
        ({"v": torch.zeros(2, 1, 2, 9)}, RuntimeError, "v is"),
        ({"k": torch.zeros(2, 1, 2, 8).half()}, RuntimeError, "k is torch.float16"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_calls_write_nothing(changes, error, message):
    cache = torch.zeros(2, 2, 7, 2, 8)
    call = {
        "q": random(2, 1, 4, 8),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "k": torch.ones(2, 1, 2, 8),
        "v": torch.ones(2, 1, 2, 8),
        "cache_seqlens": torch.tensor([4, 6], dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**{**call, **changes})
    assert not cache.any()
    flash_attn_with_kvcache(**call)
    assert int(cache.sum()) == 2 * 2 * 2 * 8


def test_padding_out_and_in():
    x = random(3, 5, 4)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    packed, indices, cu, longest, used = unpad_input(x, mask)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 2, 2, 6], 4, [2, 0, 4])
    assert torch.equal(packed, x[mask.bool()])
    assert torch.equal(pad_input(packed, indices, 3, 5), x * mask[..., None])
    spare = torch.zeros_like(mask)
    spare[1, 4] = 1
    _, _, cu, longest, used = unpad_input(x, mask, spare)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 2, 3, 7], 4, [2, 0, 4])


def test_shapes_that_are_not_flash_attns():
    with pytest.raises(RuntimeError, match=r"q has shape \(2, 3, 8\), expected \[batch, length"):
        flash_attn_func(random(2, 3, 8), random(2, 3, 8), random(2, 3, 8))
    with pytest.raises(RuntimeError, match="expected 3 in dimension 2"):
        flash_attn_qkvpacked_func(random(1, 4, 2, 2, 8))
    with pytest.raises(TypeError, match="q is list"):
        flash_attn_func([1], random(1, 1, 1, 1), random(1, 1, 1, 1))
    assert flash_attn.flash_attn_func is flash_attn_func
