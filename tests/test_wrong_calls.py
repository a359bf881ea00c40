"""Wrong calls of the public functions: the type of the exception, and a message that helps.

Each message names the argument, what was found and what was expected, and comes before any kernel.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

import attnkit
from attnkit import masks
from attnkit.testing import recorded_backends

SDPA, ATTENTION = attnkit.scaled_dot_product_attention, attnkit.attention
VARLEN, WEIGHTS, DECODE = (
    attnkit.varlen_attention,
    attnkit.attention_weights,
    attnkit.decode_attention,
)


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


q, k, v = t(2, 4, 5, 8), t(2, 4, 7, 8), t(2, 4, 7, 6)
kg, vg = t(2, 2, 7, 8), t(2, 2, 7, 6)  # two heads for four
p, pk, pv = t(5, 4, 8), t(7, 2, 8), t(7, 2, 6)  # packed
cq, ck = ints(0, 3, 5), ints(0, 2, 7)
full = torch.ones(5, 7, dtype=torch.bool)
lengths = ints(7, 4)
wants_grad = t(2, 4, 5, 8).requires_grad_()

sdpa, attention = partial(SDPA, q, k, v), partial(ATTENTION, q, k, v)
weights, decode = partial(WEIGHTS, q, k), partial(DECODE, q, k, v)
varlen = partial(VARLEN, p, pk, pv)
packed = partial(VARLEN, p, pk, pv, cq, ck)
band = masks.causal()


class Wrong(NamedTuple):
    call: object
    error: type[Exception]
    message: str


WRONG = {
    # scaled_dot_product_attention
    "query list": Wrong(lambda: SDPA([1.0], k, v), TypeError,
        r"query is list \[1.0\], expected a Tensor"),
    "key None": Wrong(lambda: SDPA(q, None, v), TypeError, "key is None, expected a Tensor"),
    "value number": Wrong(lambda: SDPA(q, k, 3), TypeError, "value is int 3, expected a Tensor"),
    "query 1-d": Wrong(lambda: SDPA(t(8), k, v), RuntimeError,
        "Expected query, key, and value to all be  at least 2 dimensional, but query has 1 dim"),
    "query 0-d": Wrong(lambda: SDPA(torch.tensor(0.0), k, v), RuntimeError,
        "query has 0 dimensions"),
    "key 1-d": Wrong(lambda: SDPA(q, t(8), v), RuntimeError, "key 1, value 4"),
    "head dims": Wrong(lambda: SDPA(q, t(2, 4, 7, 9), v), RuntimeError,
        "key has head dim 9, query has 8"),
    "value length": Wrong(lambda: SDPA(q, k, t(2, 4, 6, 6)), RuntimeError,
        "value has length 6, key has 7"),
    "batches": Wrong(lambda: SDPA(q, t(3, 4, 7, 8), t(3, 4, 7, 6)), RuntimeError,
        r"leading dimensions that do not broadcast: found \(2,\), \(3,\) and \(3,\), expected"),
    "heads without gqa": Wrong(lambda: SDPA(q, kg, vg), RuntimeError,
        "key has 2 heads, expected 4 or 1: .* enable_gqa is False"),
    "value heads": Wrong(lambda: SDPA(q, k, t(2, 3, 7, 6)), RuntimeError,
        "value has 3 heads, expected 4 or 1"),
    "gqa key heads": Wrong(lambda: SDPA(q, t(2, 3, 7, 8), vg, enable_gqa=True), RuntimeError,
        "Number of heads in key and value must divide the number of heads in query, but key has 3 "
        "heads and query has 4"),
    "gqa value heads": Wrong(lambda: SDPA(q, kg, t(2, 3, 7, 6), enable_gqa=True), RuntimeError,
        "value has 3 heads and query has 4"),
    "gqa too many": Wrong(lambda: SDPA(kg, k, v, enable_gqa=True), RuntimeError,
        "key has 4 heads and query has 2"),
    "gqa no heads": Wrong(lambda: SDPA(q, k[:, :0], v[:, :0], enable_gqa=True), RuntimeError,
        "key has 0 heads and query has 4"),
    "gqa flag": Wrong(lambda: sdpa(enable_gqa=1), TypeError,
        "enable_gqa is int 1, expected a bool"),
    "dtypes": Wrong(lambda: SDPA(q, k.double(), v), RuntimeError,
        "Expected query, key, and value to have the same dtype, but query has torch.float32, key "
        "torch.float64, value torch.float32"),
    "integers": Wrong(lambda: SDPA(q.int(), k.int(), v.int()), RuntimeError,
        "query has dtype torch.int32, expected float32, bfloat16, float16 or float64"),
    "bools": Wrong(lambda: SDPA(q.bool(), k.bool(), v.bool()), RuntimeError, "dtype torch.bool"),
    "complex": Wrong(lambda: SDPA(q.cfloat(), k.cfloat(), v.cfloat()), NotImplementedError,
        "query has dtype torch.complex64, expected float32"),
    "float8": Wrong(
        lambda: SDPA(*(x.to(torch.float8_e5m2) for x in (q, k, v))), NotImplementedError,
        "query has dtype torch.float8_e5m2, expected float32"),
    "devices": Wrong(lambda: SDPA(q, k.to("meta"), v), RuntimeError,
        "Expected query, key, and value to have the same device type, but query is on cpu, key on "
        "meta, value on cpu"),
    "sparse": Wrong(lambda: SDPA(q, k.to_sparse(), v), NotImplementedError,
        "key has layout torch.sparse_coo, expected torch.strided"),
    "nested": Wrong(
        lambda: SDPA(*(torch.nested.nested_tensor([t(2, 4, 8)]) for _ in range(3))),
        NotImplementedError, "query is a nested tensor, expected a dense one: use .*varlen"),
    "jagged": Wrong(
        lambda: SDPA(q, torch.nested.nested_tensor([t(2, 4, 8)], layout=torch.jagged), v),
        NotImplementedError, "key is a nested tensor, expected a dense one"),
    "mask with causal": Wrong(lambda: sdpa(full, is_causal=True), RuntimeError,
        "attn_mask was given together with is_causal=True, expected one of them: .*should not"),
    "mask list": Wrong(lambda: sdpa([1]), TypeError,
        "argument 'attn_mask' must be Tensor, not list"),
    "mask of attnkit": Wrong(lambda: sdpa(band), TypeError,
        "argument 'attn_mask' must be Tensor, not Mask"),
    "mask keys": Wrong(lambda: sdpa(torch.ones(5, 6, dtype=torch.bool)), RuntimeError,
        r"attn_mask has shape \(5, 6\), expected one that broadcasts to the .* \(2, 4, 5, 7\)"),
    "mask queries": Wrong(lambda: sdpa(t(2, 4, 4, 7)), RuntimeError,
        r"attn_mask has shape \(2, 4, 4, 7\), expected one that broadcasts"),
    "mask heads": Wrong(lambda: sdpa(t(2, 3, 5, 7)), RuntimeError,
        r"attn_mask has shape \(2, 3, 5, 7\)"),
    "mask rank": Wrong(lambda: sdpa(t(1, 1, 1, 5, 7)), RuntimeError,
        r"attn_mask has shape \(1, 1, 1, 5, 7\), expected one that broadcasts"),
    "mask rank of 2-d": Wrong(lambda: SDPA(q[0, 0], k[0, 0], v[0, 0], t(1, 5, 7)), RuntimeError,
        r"attn_mask has shape \(1, 5, 7\), expected .* \(5, 7\)"),
    "mask ints": Wrong(lambda: sdpa(full.int()), RuntimeError,
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
        "attn_mask.dtype: torch.int32 and query.dtype: torch.float32"),
    "mask double": Wrong(lambda: sdpa(t(5, 7, dtype=torch.float64)), RuntimeError,
        "attn_mask.dtype: torch.float64"),
    "mask half": Wrong(lambda: sdpa(t(5, 7, dtype=torch.float16)), RuntimeError,
        "attn_mask.dtype: torch.float16"),
    "mask device": Wrong(lambda: sdpa(full.to("meta")), RuntimeError,
        "attn_mask is on meta, query is on cpu"),
    "causal int": Wrong(lambda: sdpa(is_causal=1), TypeError,
        "is_causal is int 1, expected a bool"),
    "causal None": Wrong(lambda: sdpa(is_causal=None), TypeError,
        "is_causal is None, expected a bool"),
    "scale str": Wrong(lambda: sdpa(scale="1"), TypeError, "scale is str '1', expected a float"),
    "scale learned": Wrong(lambda: sdpa(scale=torch.ones((), requires_grad=True)), TypeError,
        "scale is a tensor that requires a gradient, expected a float"),
    "scale vector": Wrong(lambda: sdpa(scale=t(2)), TypeError,
        r"scale is a float32 tensor of shape \(2,\), expected a float"),
    "dropout negative": Wrong(lambda: sdpa(dropout_p=-0.1), RuntimeError,
        "dropout_p is -0.1: dropout probability has to be between 0 and 1, but got -0.1"),
    "dropout above": Wrong(lambda: sdpa(dropout_p=1.1), RuntimeError,
        "dropout_p is 1.1: .* between 0 and 1"),
    "dropout NaN": Wrong(lambda: sdpa(dropout_p=math.nan), RuntimeError, "dropout_p is nan"),
    "dropout None": Wrong(lambda: sdpa(dropout_p=None), TypeError,
        "dropout_p is None, expected a float"),
    # attention
    "3-d": Wrong(lambda: ATTENTION(q[0], k[0], v[0]), RuntimeError,
        r"query has shape \(4, 5, 8\), expected 4 dimensions: \(batch, heads, length, head dim\)"),
    "attention value 3-d": Wrong(lambda: ATTENTION(q, k, v[0]), RuntimeError,
        r"value has shape \(4, 7, 6\), expected 4 dimensions"),
    "attention batches": Wrong(lambda: ATTENTION(q, k[:1], v), RuntimeError,
        "key has batch size 1, query has 2"),
    "attention value batch": Wrong(lambda: ATTENTION(q, k, v[:1]), RuntimeError,
        "value has batch size 1, query has 2"),
    "attention head dims": Wrong(lambda: ATTENTION(q, k[..., 1:], v), RuntimeError,
        "key has head dim 7, query has 8"),
    "attention lengths": Wrong(lambda: ATTENTION(q, k[:, :, 1:], v), RuntimeError,
        "value has length 7, key has 6"),
    "attention heads": Wrong(lambda: ATTENTION(q, k[:, :3], v[:, :3]), RuntimeError,
        "key has 3 heads and query has 4"),
    "attention value heads": Wrong(lambda: ATTENTION(q, k, vg), RuntimeError,
        "value has 2 heads, key has 4"),
    "attention dtypes": Wrong(lambda: ATTENTION(q, k, v.half()), RuntimeError,
        "value torch.float16"),
    "attention None": Wrong(lambda: ATTENTION(q, k, None), TypeError,
        "value is None, expected a Tensor"),
    "mask type": Wrong(lambda: attention(mask="causal"), TypeError,
        "mask is str 'causal', expected a Mask of attnkit.masks or a Tensor"),
    "mask tensor shape": Wrong(lambda: attention(mask=full[:4]), RuntimeError,
        r"mask has shape \(4, 7\), expected one that broadcasts to the scores' \(2, 4, 5, 7\)"),
    "mask tensor dtype": Wrong(lambda: attention(mask=full.long()), RuntimeError,
        "Expected mask dtype to be bool or float .*mask.dtype: torch.int64"),
    "mask dense shape": Wrong(lambda: attention(mask=masks.from_dense(full[:4])), RuntimeError,
        r"mask has shape \(1, 1, 4, 7\), which does not broadcast to the .* \(2, 4, 5, 7\)"),
    "mask dense dtype": Wrong(
        lambda: attention(mask=masks.from_dense(t(5, 7).double())), RuntimeError,
        "mask.dtype: torch.float64 and query.dtype: torch.float32"),
    "mask keep shape": Wrong(lambda: attention(mask=masks.key_padding(full)), RuntimeError,
        r"mask's keep \(key_padding\) has shape \(5, 7\), expected \(2, 7\)"),
    "mask lengths shape": Wrong(lambda: attention(mask=masks.padding(ints(1, 2, 3))), RuntimeError,
        r"mask's lengths \(padding\) has shape \(3,\), expected \(2,\)"),
    "mask documents": Wrong(
        lambda: attention(mask=masks.documents(ints(0, 0, 1, 1, 1))), RuntimeError,
        r"mask's k_ids has shape \(1, 5\), expected \(2, 7\)"),
    "mask blocks": Wrong(lambda: attention(mask=masks.block_sparse(full[:2, :1])), RuntimeError,
        r"mask's blocks have shape \(1, 1, 2, 1\), expected \(2 or 1, 4 or 1, 1, 1\) for 5"),
    "mask device of a part": Wrong(
        lambda: attention(mask=masks.padding(lengths.to("meta"))), RuntimeError,
        "mask's lengths is on meta, expected cpu"),
    "bias bool": Wrong(lambda: attention(bias=full), TypeError,
        "bias is a bool tensor, expected a float one: pass it as mask"),
    "bias shape": Wrong(lambda: attention(bias=t(3, 5, 7)), RuntimeError,
        r"bias has shape \(3, 5, 7\), expected one that broadcasts to the scores' \(2, 4, 5, 7\)"),
    "bias rank": Wrong(lambda: attention(bias=t(1, 1, 1, 1, 7)), RuntimeError,
        r"bias has shape \(1, 1, 1, 1, 7\), expected one that broadcasts"),
    "bias dtype": Wrong(lambda: attention(bias=t(5, 7).half()), RuntimeError,
        "bias.dtype: torch.float16"),
    "bias type": Wrong(lambda: attention(bias=0.5), TypeError,
        "argument 'bias' must be Tensor, not float"),
    "softcap negative": Wrong(lambda: attention(softcap=-1.0), ValueError,
        "softcap is -1.0, expected a finite number above 0, or 0 for none"),
    "softcap NaN": Wrong(lambda: attention(softcap=math.nan), ValueError,
        "softcap is nan, expected"),
    "softcap inf": Wrong(lambda: attention(softcap=math.inf), ValueError,
        "softcap is inf, expected"),
    "softcap None": Wrong(lambda: attention(softcap=None), TypeError,
        "softcap is None, expected a float"),
    "sinks shape": Wrong(lambda: attention(sinks=t(2, 4)), RuntimeError,
        r"sinks has shape \(2, 4\), expected \(4,\)"),
    "sinks ints": Wrong(lambda: attention(sinks=t(4).int()), TypeError,
        r"sinks is a int32 tensor of shape \(4,\), expected a floating-point tensor"),
    "sinks device": Wrong(lambda: attention(sinks=t(4, device="meta")), RuntimeError,
        "sinks is on meta, query is on cpu"),
    "alibi shape": Wrong(lambda: attention(alibi=t(3)), RuntimeError,
        r"alibi has shape \(3,\), expected \(4,\) or \(2, 4\)"),
    "alibi list": Wrong(lambda: attention(alibi=[0.5]), TypeError,
        r"alibi is list \[0.5\], expected a floating-point tensor"),
    "alibi grad": Wrong(lambda: attention(alibi=t(4).requires_grad_()), RuntimeError,
        "alibi requires a gradient, expected slopes without one"),
    "attention dropout": Wrong(lambda: attention(dropout_p=2), RuntimeError,
        "dropout_p is 2: .* between 0 and 1"),
    "seed float": Wrong(lambda: attention(dropout_p=0.5, seed=1.0), TypeError,
        "seed is float 1.0, expected an int or an int64 tensor of one element"),
    "seed of two": Wrong(
        lambda: attention(dropout_p=0.5, seed=ints(1, 2, dtype=torch.int64)), TypeError,
        r"seed is a int64 tensor of shape \(2,\), expected an int or an int64 tensor of one"),
    "seed dtype": Wrong(lambda: attention(dropout_p=0.5, seed=ints(1)), TypeError,
        r"seed is a int32 tensor of shape \(1,\), expected"),
    "seed range": Wrong(lambda: attention(dropout_p=0.5, seed=2**64), ValueError,
        f"seed is {2**64}, expected a number of 64 bits"),
    "seed device": Wrong(
        lambda: attention(dropout_p=0.5, seed=t(1, dtype=torch.int64, device="meta")),
        RuntimeError, "seed is on meta, query is on cpu"),
    # varlen_attention
    "packed 4-d": Wrong(lambda: VARLEN(q, k, v, cq, ck), RuntimeError,
        r"query has shape \(2, 4, 5, 8\), expected 3 dimensions: \(all tokens, heads, head dim\)"),
    "packed head dims": Wrong(lambda: VARLEN(p, pk[..., 1:], pv, cq, ck), RuntimeError,
        "key has head dim 7, query has 8"),
    "packed tokens": Wrong(lambda: VARLEN(p, pk, pv[1:], cq, ck), RuntimeError,
        "value has 6 tokens and 2 heads, key has 7 and 2"),
    "packed heads": Wrong(lambda: VARLEN(p[:, :3], pk, pv, cq, ck), RuntimeError,
        "key has 2 heads and query has 3"),
    "cu list": Wrong(lambda: varlen([0, 5], ck), TypeError,
        r"cu_seqlens_q is list \[0, 5\], expected an int32 or int64 tensor"),
    "cu floats": Wrong(lambda: varlen(cq, ck.float()), TypeError,
        r"cu_seqlens_k is a float32 tensor of shape \(3,\), expected an int32"),
    "cu 2-d": Wrong(lambda: varlen(cq[None], ck), ValueError,
        r"cu_seqlens_q has shape \(1, 3\), expected \(sequences \+ 1,\)"),
    "cu empty": Wrong(lambda: varlen(cq[:0], ck), ValueError,
        r"cu_seqlens_q has shape \(0,\), expected \(sequences \+ 1,\)"),
    "cu counts": Wrong(lambda: varlen(cq, ck[:2]), RuntimeError,
        "cu_seqlens_k has 2 entries, cu_seqlens_q has 3"),
    "cu start": Wrong(lambda: varlen(ints(1, 3, 5), ck), ValueError,
        "cu_seqlens_q starts with 1, expected 0"),
    "cu falls": Wrong(lambda: varlen(cq, ints(0, 5, 3)), ValueError,
        r"cu_seqlens_k falls from one entry to the next, expected it to rise: \[0, 5, 3\]"),
    "cu end": Wrong(lambda: varlen(ints(0, 3, 6), ck), ValueError,
        "cu_seqlens_q ends with 6, expected at most the number of tokens, 5"),
    "cu device": Wrong(lambda: varlen(cq.to("meta"), ck), RuntimeError,
        "cu_seqlens_q is on meta, query is on cpu"),
    "max_seqlen": Wrong(lambda: packed(3.5), TypeError,
        "max_seqlen_q is float 3.5, expected an int"),
    "window int": Wrong(lambda: packed(window=3), TypeError, "window is int 3, expected a pair"),
    "window three": Wrong(lambda: packed(window=(1, 2, 3)), TypeError,
        r"window is tuple \(1, 2, 3\), expected"),
    "window floats": Wrong(lambda: packed(window=(1.0, 0)), TypeError,
        "window is float 1.0, expected an int"),
    "window below": Wrong(lambda: packed(window=(-2, 0)), ValueError,
        r"window is \(-2, 0\), expected bounds of 0 or more, or -1 for none"),
    "packed causal": Wrong(lambda: packed(causal="yes"), TypeError,
        "causal is str 'yes', expected a bool"),
    "packed alignment": Wrong(lambda: packed(bottom_right=0), TypeError,
        "bottom_right is int 0, expected a bool"),
    "packed alibi": Wrong(lambda: packed(alibi=t(2)), RuntimeError,
        r"alibi has shape \(2,\), expected \(4,\)"),
    # attention_weights
    "weights 3-d": Wrong(lambda: WEIGHTS(q[0], k), RuntimeError,
        r"query has shape \(4, 5, 8\), expected 4"),
    "weights heads": Wrong(lambda: WEIGHTS(q, k[:, :3]), RuntimeError,
        "key has 3 heads and query has 4"),
    "row above": Wrong(lambda: weights(rows=[0, 5]), IndexError,
        "rows has indices from 0 to 5, expected 0 to 4"),
    "row below": Wrong(lambda: weights(rows=-1), IndexError,
        "rows has indices from -1 to -1, expected 0 to 4"),
    "head above": Wrong(lambda: weights(heads=ints(4, dtype=torch.int64)), IndexError,
        "heads has indices from 4 to 4, expected 0 to 3"),
    "rows floats": Wrong(lambda: weights(rows=[0.5]), TypeError,
        "rows is float 0.5, expected an int"),
    "rows mask": Wrong(lambda: weights(rows=torch.ones(5, dtype=torch.bool)), TypeError,
        r"rows is a bool tensor of shape \(5,\), expected int64 indices"),
    "heads str": Wrong(lambda: weights(heads="all"), TypeError,
        "heads is str 'all', expected ints or an"),
    # decode_attention
    "decode lengths missing": Wrong(lambda: decode(None), TypeError,
        "lengths is None, expected a tensor of torch.int32"),
    "decode lengths dtype": Wrong(lambda: decode(lengths.long()), TypeError,
        r"lengths is a int64 tensor of shape \(2,\), expected a tensor of torch.int32"),
    "decode lengths shape": Wrong(lambda: decode(lengths[:1]), RuntimeError,
        r"lengths has shape \(1,\), expected \(2,\)"),
    "decode keep": Wrong(lambda: decode(lengths, keep=full), RuntimeError,
        r"keep has shape \(5, 7\), expected \(2, 7\)"),
    "decode keep dtype": Wrong(lambda: decode(lengths, keep=t(2, 7)), TypeError,
        r"keep is a float32 tensor of shape \(2, 7\), expected a tensor of torch.bool"),
    "decode left": Wrong(lambda: decode(lengths, left=-1), ValueError,
        "left is -1, expected 0 or more, or None"),
    "decode causal": Wrong(lambda: decode(lengths, causal=None), TypeError,
        "causal is None, expected a bool"),
    "decode cache dtype": Wrong(lambda: DECODE(q.half(), k, v, lengths), RuntimeError,
        "query has torch.float16, key torch.float32"),
    "decode grad": Wrong(lambda: DECODE(wants_grad, k, v, lengths), RuntimeError,
        "query requires a gradient, expected none: .* under torch.no_grad"),
    # masks
    "window left": Wrong(lambda: masks.sliding_window(-1, 0), ValueError,
        "left is -1, expected 0 or more, or None for no limit"),
    "window right": Wrong(lambda: masks.sliding_window(None, -2), ValueError,
        "right is -2, expected 0 or more"),
    "window type": Wrong(lambda: masks.sliding_window(1.5, 0), TypeError,
        "left is float 1.5, expected an int"),
    "causal type": Wrong(lambda: masks.causal(torch.ones(3)), TypeError,
        r"bottom_right is a float32 tensor of shape \(3,\), expected a bool"),
    "padding list": Wrong(lambda: masks.padding([1, 2]), TypeError,
        r"lengths is list \[1, 2\], expected an integer tensor"),
    "padding mask": Wrong(lambda: masks.padding(full), TypeError,
        r"lengths is a bool tensor of shape \(5, 7\), expected an integer tensor"),
    "padding 2-d": Wrong(lambda: masks.padding(lengths[None]), ValueError,
        r"lengths has shape \(1, 2\), expected \(batch,\)"),
    "keep float": Wrong(lambda: masks.key_padding(t(2, 7)), TypeError,
        r"keep is a float32 tensor of shape \(2, 7\), expected a bool tensor \(True = attend\)"),
    "keep rank": Wrong(lambda: masks.key_padding(full[None]), ValueError,
        r"keep has shape \(1, 5, 7\), expected \(batch, keys\) or \(keys,\)"),
    "documents float": Wrong(lambda: masks.documents(t(2, 5)), TypeError,
        r"q_ids is a float32 tensor of shape \(2, 5\), expected an integer tensor"),
    "documents rank": Wrong(lambda: masks.documents(lengths, lengths[None, None]), ValueError,
        r"k_ids has shape \(1, 1, 2\), expected \(batch, length\) or \(length,\)"),
    "blocks ints": Wrong(lambda: masks.block_sparse(full.int()), TypeError,
        "blocks is a int32 tensor"),
    "blocks rank": Wrong(lambda: masks.block_sparse(full[0]), ValueError,
        r"blocks has shape \(7,\), expected \(batch or 1, heads or 1, query blocks, key blocks\)"),
    "globals negative": Wrong(lambda: masks.global_tokens(-1), ValueError,
        "count is -1, expected 0 or more"),
    "globals type": Wrong(lambda: masks.global_tokens(True), TypeError,
        "count is bool True, expected an int"),
    "dense ints": Wrong(lambda: masks.from_dense(full.int()), TypeError,
        r"mask is a int32 tensor of shape \(5, 7\), expected a bool tensor \(True = attend\) or a"),
    "dense rank": Wrong(lambda: masks.from_dense(full[None, None, None]), ValueError,
        r"mask has shape \(1, 1, 1, 5, 7\), expected at most the four dimensions"),
    "and tensor": Wrong(lambda: band & full, TypeError,
        r"& joins a Mask with a Mask, but the right operand is a bool tensor of shape \(5, 7\)"),
    "and keep": Wrong(lambda: masks.key_padding(full) & masks.key_padding(full[:3]), ValueError,
        r"the keep vectors joined by & have shapes \(5, 7\) and \(3, 7\), expected shapes"),
    "and dense": Wrong(lambda: masks.from_dense(full) & masks.from_dense(full[:2]), ValueError,
        r"the dense masks joined by & have shapes \(1, 1, 5, 7\) and \(1, 1, 2, 7\), expected"),
    "or": Wrong(lambda: band | masks.padding(lengths), TypeError,
        r"\| joins one band \(causal or sliding_window\) with global_tokens, found Mask.*dense"),
    "or twice": Wrong(lambda: band | masks.global_tokens(1) | masks.global_tokens(2), TypeError,
        r"\| joins one band"),
    "or number": Wrong(lambda: 3 | band, TypeError,
        "| joins a Mask with a Mask, but the left operand is int 3"),
    # choice of the backend
    "backend name": Wrong(lambda: attnkit.use_backend("cuda2").__enter__(), ValueError,
        "name is 'cuda2', expected one of .*'reference'"),
    "backend None": Wrong(lambda: attnkit.use_backend(None).__enter__(), TypeError,
        "name is NoneType None, expected a str"),
    "explain": Wrong(lambda: attnkit.explain(q, k, v[..., 1:, :]), RuntimeError,
        "value has length 6, key has 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    wrong = WRONG[name]
    with recorded_backends() as ran, pytest.raises(wrong.error, match=wrong.message) as caught:
        wrong.call()
    assert type(caught.value) is wrong.error
    assert ran == []


def test_the_right_calls_that_the_table_starts_from():
    for call in (
        lambda: sdpa(full),
        lambda: sdpa(is_causal=True, scale=1, dropout_p=0.5),
        lambda: SDPA(q, kg, vg, enable_gqa=True),
        lambda: attention(mask=band, bias=t(5, 7), softcap=2.0, sinks=t(4), alibi=t(2, 4)),
        lambda: packed(5, 7, window=(3, 0), causal=True, alibi=t(4)),
        lambda: weights(rows=[0, 4], heads=3),
        lambda: decode(lengths, keep=torch.ones(2, 7, dtype=torch.bool), left=3),
    ):
        assert isinstance(call(), torch.Tensor)


def test_the_table_is_long_enough():
    assert len(WRONG) >= 60
