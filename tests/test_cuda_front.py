"""What users call, over the CUDA kernels in the emulator: caches, attention, operators, tracing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attnkit
from attnkit import dispatch, flash_attn, testing
from attnkit.cache import KVCache, PagedKVCache
from attnkit.nn import RotaryEmbedding
from attnkit.spec import AttentionSpec, CacheArgs, RotaryTables, TensorArgs

sys.path.insert(0, str(Path(__file__).parent))
from cuda_kernels import VARIANT, emulated

pytestmark = pytest.mark.skipif(VARIANT != "plain", reason="the sanitized kernels run elsewhere")
HEADS, D = 2, 64


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Grows by "cuda.decode" and the like; "cuda" is the emulator, on CPU tensors."""
    monkeypatch.setitem(dispatch.BACKENDS, "cuda", emulated())
    torch.manual_seed(0)
    with testing.recorded_backends() as names:
        yield names


def tokens(batch: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(batch, HEADS, n, D).to(dtype) for _ in "kv")
    return k, v


@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_paged_cache(ran, dtype, quantize):
    """Prompts, steps, a fork and its copied page, rotary keys: beside the reference backend."""
    caches = {}
    for name in ("cuda", "reference"):
        caches[name] = PagedKVCache.allocate(
            12, 16, HEADS, D, max_sequences=4, max_pages_per_sequence=4, dtype=dtype,
            quantize=quantize,
        )  # fmt: skip
        assert caches[name].add(2) == [0, 1]
    cos, sin = RotaryEmbedding(D, D).tables(torch.arange(64), torch.float32)
    for step, n in enumerate((21, 1, 5)):
        ids = [0, 1]
        if step == 2:
            for cache in caches.values():
                assert cache.fork(0) == [2]
            ids = [2, 1]
        k, v = tokens(2, n, dtype)
        q = torch.randn(2, 4 * HEADS, n, D).to(dtype)
        found = {}
        for name, cache in caches.items():
            with dispatch.use_backend(name):
                cache.append(k, v, ids, RotaryTables(cos, sin, False))
                found[name] = cache.attend(q, ids)
        # a key may fall to the other side of a rounding, by its rotation
        bound = {None: 4, "int8": 16, "fp8": 64}[quantize] * torch.finfo(dtype).eps
        bound = (
            bound if dtype == torch.bfloat16 else {None: 1e-5, "int8": 1e-3, "fp8": 2e-2}[quantize]
        )
        torch.testing.assert_close(found["cuda"], found["reference"], rtol=bound, atol=bound)
    assert ran.count("cuda.decode") == 3


def test_a_contiguous_cache(ran):
    k, v = tokens(3, 7, torch.float32)
    cache = KVCache.like(k, v, 40)
    cache.append(k, v)
    q = torch.randn(3, 4, 2, D)
    with dispatch.use_backend("reference"):
        want = cache.attend(q, left=4, softcap=2.0)
    with dispatch.use_backend("cuda"):
        torch.testing.assert_close(cache.attend(q, left=4, softcap=2.0), want)
    assert ran == ["reference.decode", "cuda.decode"]


def test_flash_attns_call_appends_and_decodes(ran):
    q, new_k, new_v = (torch.randn(2, 3, h, D) for h in (4, HEADS, HEADS))
    lengths = torch.tensor([5, 30], dtype=torch.int32)
    found = []
    for name in ("reference", "cuda"):
        torch.manual_seed(1)
        k, v = (torch.randn(2, 40, HEADS, D) for _ in "kv")
        with dispatch.use_backend(name):
            out = flash_attn.flash_attn_with_kvcache(
                q, k, v, new_k, new_v, cache_seqlens=lengths, causal=True
            )
        found.append((out, k, v))
    for got, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(got, want)
    assert ran == ["reference.decode", "cuda.extend"]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_paged_cache_is_extended_by_one_call(ran, quantize):
    found = []
    for name in ("reference", "cuda"):
        torch.manual_seed(1)
        cache = PagedKVCache.allocate(
            12, 16, HEADS, D, max_sequences=2, max_pages_per_sequence=4, dtype=torch.float32,
            quantize=quantize,
        )  # fmt: skip
        ids = cache.add(2)
        with dispatch.use_backend(name):
            for n in (21, 1):
                q = torch.randn(2, 4 * HEADS, n, D)
                out = cache.extend(q, *tokens(2, n, torch.float32), ids)
        found.append(out)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    assert ran == ["reference.decode"] * 2 + ["cuda.extend"] * 2


def test_attention_without_a_gradient(ran):
    x = torch.randn(1, 2, 9, D, requires_grad=True)
    with dispatch.use_backend("cuda"):
        with torch.no_grad():
            got = attnkit.scaled_dot_product_attention(x, x, x, is_causal=True)
        with pytest.raises(NotImplementedError, match="a gradient is wanted"):
            attnkit.scaled_dot_product_attention(x, x, x, is_causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(got, want)
    assert ran == ["cuda.forward"]


def test_operators():
    """Schema, fakes and autograd registration, by torch's own opcheck."""
    library = emulated().register_fakes("attnkit_emulated")
    operators = torch.ops.attnkit_emulated
    q, (k, v) = torch.randn(2, 3, 4, D).transpose(1, 2), tokens(2, 20, torch.float32)
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    args, spec = TensorArgs(lengths=lengths), AttentionSpec(0.1, None, 0, True)
    torch.library.opcheck(operators.cuda_decode.default, (q, k, v, *args, *spec, *CacheArgs()))
    torch.library.opcheck(operators.cuda_forward.default, (q, k, v, *args, *spec))
    new, empty = tokens(2, 1, torch.float32), torch.zeros(2, dtype=torch.int32)
    torch.library.opcheck(
        operators.cuda_append.default,
        (*new, k, v, None, None, empty, None, None, None, None, False),
    )
    args = args._replace(lengths=torch.tensor([19, 7], dtype=torch.int32))
    torch.library.opcheck(
        operators.cuda_extend.default,
        (q[:, :, :1], *new, k, v, *args, *spec, *CacheArgs(), None, None, False, None),
    )
    del library


def test_a_compiled_step_is_one_graph():
    library = emulated().register_fakes("attnkit_emulated")
    torch._dynamo.reset()
    k, v = tokens(2, 20, torch.bfloat16)
    q, lengths = torch.randn(2, 4, 1, D).bfloat16(), torch.tensor([20, 7], dtype=torch.int32)

    def step(q, k, v, lengths):
        with dispatch.use_backend("cuda"):
            return attnkit.decode_attention(q, k, v, lengths)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v, lengths), step(q, k, v, lengths))
    del library


def test_compiled_attention_of_slices():
    """A graph does not know that a tensor starts between two multiples of 16 bytes."""
    library = emulated().register_fakes("attnkit_emulated")
    torch._dynamo.reset()
    packed = torch.randn(2 * 3 * 4 * 9 * D + 5)

    def slices(by: int) -> list[torch.Tensor]:
        return list(packed[by : len(packed) - 5 + by].view(3, 2, 4, 9, D).unbind())

    def attend(q, k, v):
        with dispatch.use_backend("cuda"):
            return attnkit.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with torch.no_grad():
        for by in (0, 1, 3, 4):
            x = slices(by)
            assert (x[1].data_ptr() - slices(0)[1].data_ptr()) == 4 * by
            want = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)
            torch.testing.assert_close(compiled(*x), want)
            torch.testing.assert_close(attend(*x), want)
    del library
