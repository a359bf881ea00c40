"""Cases, the float64 truth and the tolerance that tests and benchmarks share.

A `Case` is one attention call in numbers, `build` gives its tensors in a dtype, `naive` computes it
by definition with whole matrices, and `check` holds a result against `naive` in float64:

    error  <=  2 * (error of `naive` in the same dtype)  +  float noise

for the largest error and for its root mean square, of the output, lse and every gradient.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import dispatch
from attnkit.backends.reference import philox
from attnkit.spec import BLOCK, AttentionSpec, TensorArgs

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INF = float("inf")


@dataclass(frozen=True)
class Case:
    """One attention call: q [batch, heads, queries, dim], k and v [batch, kv_heads, keys, .].

    hide: "" or any of lengths, keep (scattered), left (keep, padded on the left), segments,
        blocks, joined by "+".
    bias: "" or dtype and pattern, e.g. "bool:bhqk", "float:1h1k" or "float32:11qk" (float32
        whatever the dtype of q).  A 1 is a dimension along which the bias is broadcast.
    low: some entries of the float bias are the lowest finite float, some -inf; and a row of each.
    layout: strides of q, k, v: plain, transposed ([B, L, H, D] memory), sliced (odd offsets in a
        larger buffer), inner2 (every second element), expanded (k and v stretched along the batch).
        Whatever lies between the elements is NaN.
    packed: lengths of packed sequences, queries and keys; replaces batch, queries and keys.
    """

    name: str
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 17
    keys: int = 65
    dim: int = 16
    value_dim: int | None = None
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    hide: str = ""
    bias: str = ""
    low: bool = False
    alibi: str = ""  # "", "head" or "batch"
    softcap: float = 0.0
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    layout: str = "plain"
    packed: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return self.name


class Inputs(NamedTuple):
    """The tensors of a case, as a backend takes them, and the incoming gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    args: TensorArgs
    spec: AttentionSpec
    dout: Tensor
    dlse: Tensor


class Results(NamedTuple):
    """What a call gives: a gradient is None where there is no such input or nobody asked."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others: what scores, softmax and lse are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- inputs


def build(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """The tensors of a case on the CPU; the same numbers (rounded to dtype) for every dtype."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def chance(p: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=g) < p

    b, hq, hkv, lq, lk = case.batch, case.heads, case.kv_heads, case.queries, case.keys
    if case.packed:
        b, lq, lk = 1, sum(n for n, _ in case.packed), sum(n for _, n in case.packed)
    dv = case.dim if case.value_dim is None else case.value_dim
    q = _lay_out(normal(b, hq, lq, case.dim).to(dtype), case.layout)
    stretch = case.layout == "expanded"
    kb = 1 if stretch else b
    k = _lay_out(normal(kb, hkv, lk, case.dim).to(dtype), case.layout).expand(b, -1, -1, -1)
    v = _lay_out(normal(kb, hkv, lk, dv).to(dtype), case.layout).expand(b, -1, -1, -1)

    fields: dict[str, Tensor] = {}
    for hide in case.hide.split("+") if case.hide else ():
        if hide == "lengths":  # from 0 (no key at all) to all
            fields["lengths"] = torch.linspace(lk, 0, b).round().to(torch.int32)
        elif hide == "keep":
            fields["keep"] = chance(0.5, b, lk)
        elif hide == "left":
            start = torch.linspace(0, max(lk - 1, 0), b).long()
            fields["keep"] = torch.arange(lk) >= start[:, None]
        elif hide == "segments":
            # not sorted, and with ids that only one side has
            for name, n, first in (("q_segments", lq, -1), ("k_segments", lk, 0)):
                ids = torch.randint(first, first + 4, (b, n), generator=g)
                fields[name] = ids.to(torch.int32)
        elif hide == "blocks":
            tiles = (-(-lq // BLOCK), -(-lk // BLOCK))
            fields["blocks"] = chance(0.6, b if b > 2 else 1, hq, *tiles)
        else:
            raise ValueError(f"hide is {case.hide!r}: {hide!r} is not known")
    if case.bias:
        kind, _, pattern = case.bias.partition(":")
        sizes = {"1": 1, "b": b, "h": hq, "q": lq, "k": lk}
        shape = [sizes[letter] for letter in pattern]
        if kind == "bool":
            bias = chance(0.6, *shape)
            bias[:, :, lq // 2 : lq // 2 + 1] &= shape[2] == 1  # a row without keys
        else:
            bias = normal(*shape).to(torch.float32 if kind == "float32" else dtype)
            if case.low:
                bias[chance(0.2, *shape)] = torch.finfo(bias.dtype).min
                bias[chance(0.2, *shape)] = -_INF
                if "q" in pattern:
                    bias[:, :, :1] = torch.finfo(bias.dtype).min
                    bias[:, :, lq // 2 : lq // 2 + 1] = -_INF
        fields["bias"] = bias.expand(b, hq, lq, lk)
    acc = accumulation_dtype(dtype)
    if case.sinks:
        fields["sinks"] = normal(hq).to(acc)
    if case.alibi:
        rows = b if case.alibi == "batch" else 1
        fields["alibi"] = 0.02 + 0.1 * torch.rand(rows, hq, generator=g)
    if case.dropout_p > 0:
        fields["seed"] = torch.tensor(0x0123456789ABCDEF)
    if case.packed:
        for name, side in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            lengths = torch.tensor([0, *(n[side] for n in case.packed)])
            fields[name] = lengths.cumsum(0).to(torch.int32)
    spec = AttentionSpec(
        scale=(case.dim**-0.5 if case.dim else 1.0) if case.scale is None else case.scale,
        left=case.left,
        right=case.right,
        bottom_right=case.bottom_right,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
    )
    dout = _lay_out(normal(b, hq, lq, dv).to(dtype), case.layout)
    dlse = normal(b, hq, lq).to(acc)
    return Inputs(q, k, v, TensorArgs(**fields), spec, dout, dlse)


def _lay_out(x: Tensor, layout: str) -> Tensor:
    """The numbers of x [B, H, L, D] in other strides, with NaN in all memory between them."""
    b, h, n, d = x.shape
    if layout == "transposed":
        view = x.new_full((b, n + 1, h + 1, d + 1), math.nan)[:, 1:, 1:, 1:].transpose(1, 2)
    elif layout == "sliced":
        view = x.new_full((b + 1, h + 2, n + 3, d + 5), math.nan)[1:, 1:-1, 1:-2, 3:-2]
    elif layout == "inner2":
        view = x.new_full((b, h, n, 2 * d + 1), math.nan)[..., 1::2]
    else:
        return x.clone()
    return view.copy_(x)


# ---------------------------------------------------------------- the truth


def visible(x: Inputs) -> Tensor:
    """Which key each query sees, bool [B, Hq, Lq, Lk], built head by head from the mask's parts."""
    (b, hq, lq, _), lk, a = x.q.shape, x.k.shape[2], x.args
    seen = torch.zeros(b, hq, lq, lk, dtype=torch.bool)
    for rows, keys, _ in _sequences(x):
        nq, nk = rows.stop - rows.start, keys.stop - keys.start
        off = nk - nq if x.spec.bottom_right else 0
        band = torch.ones(nq, nk, dtype=torch.bool)
        if x.spec.right is not None:
            band = band.tril(off + x.spec.right)
        if x.spec.left is not None:
            band = band.triu(off - x.spec.left)
        seen[:, :, rows, keys] = band
    for i in range(b):
        if a.lengths is not None:
            seen[i, :, :, int(a.lengths[i]) :] = False
        if a.keep is not None:
            seen[i, :, :, ~a.keep[i]] = False
        if a.q_segments is not None and a.k_segments is not None:
            seen[i] &= a.q_segments[i, :, None] == a.k_segments[i]
        if a.blocks is not None:
            wide = a.blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
            seen[i] &= wide[min(i, wide.shape[0] - 1), :, :lq, :lk]
    if a.bias is not None:
        seen &= a.bias if a.bias.dtype == torch.bool else a.bias != -_INF
    return seen


def _sequences(x: Inputs) -> list[tuple[slice, slice, int]]:
    """Rows, keys and dropout index of each packed sequence; one that is all of it if not packed."""
    if x.args.cu_seqlens_q is None or x.args.cu_seqlens_k is None:
        return [(slice(0, x.q.shape[2]), slice(0, x.k.shape[2]), -1)]
    q, k = x.args.cu_seqlens_q.tolist(), x.args.cu_seqlens_k.tolist()
    return [(slice(q[n], q[n + 1]), slice(k[n], k[n + 1]), n) for n in range(len(q) - 1)]


class Pattern(NamedTuple):
    """What is asked of each score: visible and kept bool [B, Hq, Lq, Lk], distance [Lq, Lk]."""

    visible: Tensor
    kept: Tensor  # by dropout
    distance: Tensor  # |i + off - j|, float64


def pattern(x: Inputs) -> Pattern:
    """The masks of a call as whole matrices."""
    (b, hq, lq, _), lk = x.q.shape, x.k.shape[2]
    distance = torch.zeros(lq, lk, dtype=torch.float64)
    kept = torch.ones(b, hq, lq, lk, dtype=torch.bool)
    for rows, keys, n in _sequences(x):
        i = torch.arange(rows.stop - rows.start)[:, None]
        j = torch.arange(keys.stop - keys.start)
        off = len(j) - len(i) if x.spec.bottom_right else 0
        distance[rows, keys] = (i + off - j).abs().double()
        if x.spec.dropout_p > 0 and x.args.seed is not None:
            batch = torch.arange(b)[:, None, None, None] if n < 0 else torch.tensor(n)
            bits = philox(x.args.seed, batch, torch.arange(hq)[:, None, None], i, j)
            kept[:, :, rows, keys] = (bits >> 8).double() * 2.0**-24 >= x.spec.dropout_p
    return Pattern(visible(x), kept, distance)


def _unexpanded(bias: Tensor) -> Tensor:
    for d in range(4):
        if bias.stride(d) == 0:
            bias = bias.narrow(d, 0, min(1, bias.shape[d]))
    return bias


def naive(
    x: Inputs, dtype: torch.dtype, gradients: bool = True, masks: Pattern | None = None
) -> Results:
    """The call with whole matrices in `dtype`, as one would write it by hand; autograd's gradients.

    In float64 this is the truth, in the dtype of the inputs the yardstick of what is reachable.
    Masked keys and values must be finite.
    """
    acc = accumulation_dtype(dtype)
    seen, kept, distance = pattern(x) if masks is None else masks
    bias = x.args.bias if x.args.bias is not None and x.args.bias.is_floating_point() else None
    small = None if bias is None else _unexpanded(bias)
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v))
    # the lowest finite float drowns a score in float32, but is no number (or no ocean) in 16 bits
    drowns = small is not None and bool((small < -1e4).any())
    small, sinks = (
        None if t is None else t.detach().to(to).requires_grad_()
        for t, to in ((small, acc if drowns else dtype), (x.args.sinks, dtype))
    )
    group = q.shape[1] // max(k.shape[1], 1)
    s = q @ k.repeat_interleave(group, 1).mT * x.spec.scale
    if x.spec.softcap > 0:
        s = torch.tanh(s / x.spec.softcap) * x.spec.softcap
    if x.args.alibi is not None:
        s = s - (x.args.alibi.double()[:, :, None, None] * distance).to(dtype)
    if small is not None:
        s = s + small
    s = s.masked_fill(~seen, -_INF)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    dead = (s == -_INF).all(-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    # not logsumexp, whose derivative exp(s - lse) is 1, not 1 / n, in a row of the lowest float
    top = torch.cat([s, s.new_full((*s.shape[:3], 1), -_INF)], -1).detach().to(acc).amax(-1)
    total = (s.to(acc) - top[..., None]).exp().sum(-1)
    lse = (top + total.log()).masked_fill(dead[..., 0], -_INF)
    p = s.softmax(-1).masked_fill(dead, 0.0)[..., : k.shape[2]].masked_fill(~seen, 0.0)
    if x.spec.dropout_p > 0:
        p = p * kept / (1.0 - x.spec.dropout_p) if x.spec.dropout_p < 1 else p * 0.0
    out = p.to(dtype) @ v.repeat_interleave(group, 1)
    if not gradients:
        return Results(out.detach(), lse.detach())
    leaves = (q, k, v, small, sinks)
    wanted = [t for t in leaves if t is not None]
    above = (x.dout.to(dtype), x.dlse.to(acc))
    found = iter(torch.autograd.grad((out, lse), wanted, above, materialize_grads=True))
    return Results(out.detach(), lse.detach(), *(t if t is None else next(found) for t in leaves))


def _noise(x: Inputs, masks: Pattern, truth: Results) -> Results:
    """What rounding alone may do to each result, from the absolute values that it is a sum of."""
    seen, kept, distance = masks
    eps = torch.finfo(accumulation_dtype(x.q.dtype)).eps
    group = x.q.shape[1] // max(x.k.shape[1], 1)
    q, dout = x.q.double().abs(), x.dout.double().abs()
    k, v = (t.double().abs().repeat_interleave(group, 1) for t in (x.k, x.v))
    s = (x.q.double() @ x.k.double().repeat_interleave(group, 1).mT) * x.spec.scale
    size = abs(x.spec.scale) * (q @ k.mT)
    if x.spec.softcap > 0:
        s = torch.tanh(s / x.spec.softcap) * x.spec.softcap
    if x.args.alibi is not None:
        bent = x.args.alibi.double()[:, :, None, None] * distance
        s, size = s - bent, size + bent
    if x.args.bias is not None and x.args.bias.is_floating_point():
        s = s + x.args.bias.double()
        size = size + x.args.bias.double().abs().clamp(max=1e30)
    sinks = s.new_full((1,), -_INF) if x.args.sinks is None else x.args.sinks.double()
    sinks = sinks[:, None, None].expand(*s.shape[:3], 1)
    p, p_sink = (
        torch.cat([s.masked_fill(~seen, -_INF), sinks], -1).softmax(-1).split((s.shape[3], 1), -1)
    )
    p = p.masked_fill(~seen, 0.0)  # where no key is seen there is NaN
    keep = kept / (1.0 - x.spec.dropout_p) if x.spec.dropout_p < 1 else kept * 0.0
    grow = 1.0 + torch.where(seen & (size < 1e30), size * p, 0.0).sum(-1, keepdim=True)
    dp = dout @ v.mT * keep
    total = (p * dp).sum(-1, keepdim=True) + x.dlse.double().abs()[..., None]
    ds = p * (dp + total) * grow  # an error in a score is one in every weight of the row

    def fold(t: Tensor) -> Tensor:
        return t.unflatten(1, (x.k.shape[1], group)).sum(2) if x.k.shape[1] else t[:, :0]

    # The backward pass is given `out` rounded to its dtype, and with it takes off every weight's
    # gradient what is common to the row.  Rows err independently of each other.
    rounding = torch.finfo(x.q.dtype).eps / 2
    off = (x.dout.double() * truth.out).norm(dim=-1, keepdim=True) * rounding
    dbias = dsinks = None
    if x.args.bias is not None and x.args.bias.is_floating_point():
        shape = _unexpanded(x.args.bias).shape
        by_row = (p * off).sum_to_size(*s.shape[:3], shape[3])
        dbias = 2 * eps * ds.sum_to_size(shape) + by_row.square().sum_to_size(shape).sqrt()
    if x.args.sinks is not None:
        dsinks = 2 * eps * (p_sink * total * grow).sum((0, 2, 3))
        dsinks = dsinks + (p_sink * off).square().sum((0, 2, 3)).sqrt()
    return Results(
        2 * eps * (p * keep) @ v * grow,
        2 * eps * (grow[..., 0] + truth.lse.masked_fill(truth.lse == -_INF, 0.0).abs()),
        2 * eps * abs(x.spec.scale) * (ds @ k),
        2 * eps * fold(abs(x.spec.scale) * (ds.mT @ q)),
        2 * eps * fold((p * keep * grow).mT @ dout),
        dbias,
        dsinks,
    )


# ---------------------------------------------------------------- comparison


def _error(t: Tensor) -> tuple[float, float]:
    """The largest and the root mean square of a tensor's values."""
    largest = float(t.abs().max()) if t.numel() else 0.0
    if largest in (0.0, _INF):
        return largest, largest
    return largest, largest * float((t / largest).square().mean().sqrt())  # squares of 1e300 fit


class Expected(NamedTuple):
    """The truth of a case; per result the largest and mean square error allowed, and its dtype."""

    truth: Results
    allowed: dict[str, tuple[float, float]]
    dtypes: dict[str, torch.dtype]


def expect(x: Inputs, gradients: bool = True) -> Expected:
    """The float64 truth of a call and the tolerance for a result in the dtype of its inputs."""
    dtype, masks = x.q.dtype, pattern(x)
    truth = naive(x, torch.float64, gradients, masks)
    same = naive(x, dtype, gradients, masks)
    precise = naive(x, accumulation_dtype(dtype), False, masks)  # lse is never kept in 16 bits
    noise = _noise(x, masks, truth)
    eps = torch.finfo(accumulation_dtype(dtype)).eps
    allowed = {}
    for name in Results._fields:
        right, other = getattr(truth, name), getattr(same, name)
        if right is None:
            continue
        if name == "lse":
            other = precise.lse
        finite = right.isfinite()
        to = _result_dtype(name, x)
        rounding = torch.finfo(to).eps / 2 if torch.finfo(to).eps > eps else 0.0
        bounds = [
            2 * theirs + unavoidable + rounding * result
            for theirs, unavoidable, result in zip(
                _error((other.double() - right)[finite]),
                _error(getattr(noise, name)),
                _error(right[finite]),
                strict=True,
            )
        ]
        allowed[name] = (bounds[0], bounds[1])
    return Expected(truth, allowed, {name: _result_dtype(name, x) for name in allowed})


def _result_dtype(name: str, x: Inputs) -> torch.dtype:
    """The dtype that the contract gives a result."""
    if name == "dbias" and x.args.bias is not None:
        return x.args.bias.dtype
    return accumulation_dtype(x.q.dtype) if name in ("lse", "dsinks") else x.q.dtype


@cache
def expected(case: Case, dtype: torch.dtype) -> tuple[Inputs, Expected]:
    """`build` and `expect` of a case, computed once."""
    x = build(case, dtype)
    return x, expect(x)


def complaints(got: Results, want: Expected) -> list[str]:
    """What is wrong with a result, one sentence each; empty if it is right."""
    wrong = []
    for name, allowed in want.allowed.items():
        have, right = getattr(got, name), getattr(want.truth, name)
        if have is None:
            continue
        if have.dtype != want.dtypes[name]:
            wrong.append(f"{name} is {have.dtype}, expected {want.dtypes[name]}")
        if have.shape != right.shape:
            wrong.append(f"{name} is {tuple(have.shape)}, expected {tuple(right.shape)}")
            continue
        finite, value = right.isfinite(), have.double()
        if not torch.equal(value[~finite], right[~finite]):
            wrong.append(f"{name} is not {right[~finite].unique().tolist()} where that is right")
        bad = int((~value[finite].isfinite()).sum())
        if bad:
            wrong.append(f"{name} has {bad} of {have.numel()} values that are not finite")
            continue
        error = _error((value - right)[finite])
        for kind, e, a in zip(("largest", "mean square"), error, allowed, strict=True):
            if not e <= a:
                wrong.append(f"{name}: {kind} error {e:.3g} is above {a:.3g}")
    return wrong


def check(got: Results, want: Expected, what: Any = "") -> None:
    """Raise AssertionError with every complaint about a result."""
    wrong = complaints(got, want)
    assert not wrong, f"{what}: " + "; ".join(wrong)


def run(name: str, x: Inputs, gradients: bool = True) -> Results:
    """Forward and all gradients of a call on one backend, in fresh memory full of NaN."""
    backend = dispatch.BACKENDS[name]
    reason = backend.supports(x.q, x.k, x.v, x.args, x.spec)
    assert reason is None, f"backend {name} does not take the call: {reason}"
    with poisoned_memory():
        out, lse = backend.forward(x.q, x.k, x.v, x.args, x.spec)
        if not gradients:
            return Results(out, lse)
        bias = x.args.bias is not None and x.args.bias.is_floating_point()
        needs = (True, True, True, bias, x.args.sinks is not None)
        grads = backend.backward(x.dout, x.dlse, x.q, x.k, x.v, out, lse, x.args, x.spec, needs)
    return Results(out, lse, *grads)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are full of NaN, or the largest integer: an unwritten result is seen."""
    on = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    setting: Any = torch.utils.deterministic  # a module that mypy does not see through
    fill = setting.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    setting.fill_uninitialized_memory = True
    try:
        yield
    finally:
        setting.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(on, warn_only=warn)


@contextmanager
def recorded_backends() -> Iterator[list[str]]:
    """A list that grows by the backend and function ("cpu.forward") of every call in the block.

    For eager calls of one thread: the backend modules' functions are replaced while it lasts.
    """
    ran: list[str] = []
    saved: list[tuple[Any, str, Any]] = []

    def wrap(name: str, function: Any) -> Any:
        def recording(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return function(*args, **kwargs)

        return recording

    try:
        for name, module in dispatch.BACKENDS.items():
            for function in ("forward", "backward", "decode", "extend"):
                original = getattr(module, function, None)
                if original is None:  # not every backend extends a cache in one call
                    continue
                saved.append((module, function, original))
                setattr(module, function, wrap(f"{name}.{function}", original))
        yield ran
    finally:
        for module, function, original in saved:
            setattr(module, function, original)


# ---------------------------------------------------------------- cases


def pairwise(axes: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A short list of choices, one value per axis, in which every pair of values occurs together.

    Greedy and deterministic: each choice starts from an open pair and takes, axis by axis, the
    value that closes the most.
    """
    names = list(axes)
    open_pairs = {
        (a, i, b, j)
        for n, a in enumerate(names)
        for b in names[n + 1 :]
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }

    def pair(a: str, i: int, b: str, j: int) -> tuple[str, int, str, int]:
        return (a, i, b, j) if names.index(a) < names.index(b) else (b, j, a, i)

    rows: list[dict[str, Any]] = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        row = {a: i, b: j}
        for name in names:
            if name not in row:
                gains = [
                    sum(pair(name, n, other, m) in open_pairs for other, m in row.items())
                    for n in range(len(axes[name]))
                ]
                # equal gains: go round the values, so that none is only ever the first choice
                turn = len(rows) % len(gains)
                order = [*range(turn, len(gains)), *range(turn)]
                row[name] = max(order, key=gains.__getitem__)
        open_pairs -= {pair(a, row[a], b, row[b]) for a in row for b in row if a != b}
        rows.append({name: axes[name][n] for name, n in row.items()})
    return rows


@cache
def cases() -> tuple[Case, ...]:
    """The cases of the contract: every pair of features at odd sizes, then the rare corners."""
    axes: dict[str, Sequence[Any]] = {
        "bias": [
            {},
            {"bias": "bool:bhqk"},
            {"bias": "bool:11qk"},
            {"bias": "float:bhqk"},
            {"bias": "float:1hqk"},
            {"bias": "float:b11k"},
            {"bias": "float32:11q1"},
            {"bias": "float:bh1k", "low": True},
            {"bias": "float32:b1qk", "low": True},
        ],
        "lengths": [
            {"queries": 17, "keys": 17},
            {"queries": 63, "keys": 65},
            {"queries": 65, "keys": 63},
            {"queries": 1, "keys": 130},
            {"queries": 130, "keys": 111},
            {"queries": 111, "keys": 1},
        ],
        "band": [
            {},
            {"right": 0},
            {"right": 0, "bottom_right": True},
            {"left": 7, "right": 3},
            {"left": 20, "right": 0, "bottom_right": True},
            {"left": 0, "right": 0},
        ],
        "hide": [
            {},
            *(
                {"hide": h}
                for h in ("lengths", "keep", "left", "segments", "blocks", "lengths+keep")
            ),
        ],
        "heads": [
            {"batch": 1, "heads": 1, "kv_heads": 1},
            {"batch": 2, "heads": 4, "kv_heads": 2},
            {"batch": 3, "heads": 2, "kv_heads": 2},
            {"batch": 1, "heads": 6, "kv_heads": 1},
        ],
        "dims": [
            {"dim": 16},
            {"dim": 17, "value_dim": 33},
            {"dim": 64, "value_dim": 8},
            {"dim": 1, "value_dim": 64},
            {"dim": 65, "value_dim": 1},
        ],
        "alibi": [{}, {"alibi": "head"}, {"alibi": "batch"}],
        "softcap": [{}, {"softcap": 2.0}],
        "sinks": [{}, {"sinks": True}],
        "dropout": [{}, {"dropout_p": 0.3}],
        "scale": [{}, {"scale": -0.3}],
        "layout": [{"layout": n} for n in ("plain", "transposed", "sliced", "inner2", "expanded")],
    }
    found = []
    for n, row in enumerate(pairwise(axes)):
        fields = {key: value for part in row.values() for key, value in part.items()}
        told = [str(v) for k, v in fields.items() if k in ("bias", "hide", "alibi", "layout") and v]
        told += [k for k in ("right", "left", "softcap", "sinks", "dropout_p") if k in fields]
        size = "{queries}x{keys}".format(**fields)
        found.append(Case(f"pair{n:02d}-{size}-" + "-".join(told), **fields))
    return (*found, *_corners())


def _corners() -> list[Case]:
    big: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 33, "keys": 65}
    return [
        Case("tiny", 1, 1, 1, 1, 1, 1),
        Case("one-key-causal", 2, 2, 2, 1, 1, 8, right=0),
        Case("scale-zero", scale=0.0),
        Case("long-causal", 1, 2, 1, 300, 300, 40, right=0),
        Case("long-causal-bottom-right", 1, 2, 2, 70, 300, 24, right=0, bottom_right=True),
        Case("more-queries-than-keys", 1, 2, 2, 200, 70, 24, right=0, bottom_right=True),
        Case("long-window", 1, 2, 1, 300, 300, 32, left=40, right=10, softcap=5.0),
        Case("window-off-the-keys", 1, 2, 1, 200, 65, 16, left=3, right=3),
        Case("negative-window", 1, 2, 1, 65, 65, 16, left=9, right=-3),
        Case("long-blocks", 2, 2, 1, 260, 200, 16, hide="blocks", right=0),
        Case("long-segments", 2, 2, 1, 200, 200, 16, hide="segments+lengths", alibi="head"),
        *(Case(f"dim{d}", dim=d, right=0, **big) for d in (2, 31, 48, 72, 80, 96, 128, 160, 256)),
        Case("dim-0", dim=0, value_dim=5),
        Case("dim512", 1, 1, 1, 17, 33, 512),
        Case("value-dim-0", dim=8, value_dim=0),
        Case("no-keys", keys=0, sinks=True),
        Case("no-keys-no-sink", keys=0),
        Case("no-queries", queries=0, bias="float:1hqk"),
        Case("no-batch", batch=0, sinks=True),
        Case("no-heads", heads=0, kv_heads=0),
        Case("bias-scalar", bias="float:1111"),
        Case("bias-column", bias="float32:bhq1", right=0),
        Case("bias-row", bias="float:111k", sinks=True),
        Case("bias-batch", bias="float:b111"),
        Case("bias-of-every-batch", 3, 2, 2, 65, 70, 16, bias="float:11qk", hide="lengths"),
        Case("dropout-all", dropout_p=1.0, sinks=True),
        Case("dropout-half-long", 2, 4, 2, 70, 140, 16, dropout_p=0.5, right=0),
        Case("dropout-nearly-all", dropout_p=0.9, bias="float:bhqk"),
        Case("packed", dim=16, packed=((17, 17), (1, 65), (63, 63), (70, 70))),
        Case(
            "packed-causal",
            dim=24,
            packed=((5, 9), (0, 7), (130, 130), (3, 0), (66, 40)),
            right=0,
            bottom_right=True,
            sinks=True,
        ),
        Case(
            "packed-window",
            dim=8,
            value_dim=12,
            packed=((70, 90), (33, 17), (1, 1)),
            left=20,
            right=4,
            alibi="head",
            softcap=4.0,
            layout="transposed",
        ),
        Case("packed-dropout", packed=((19, 23), (66, 70)), right=0, dropout_p=0.4),
        Case("packed-keep", packed=((19, 23), (66, 70)), hide="keep", right=0),
        Case("packed-empty", packed=((0, 0), (0, 5))),
    ]


def far_heads(t: Tensor, apart: int = 2**31 + 64) -> Tensor:
    """A copy of t [1, H, L, D], heads ``apart`` elements from each other; the rest is untouched."""
    elements = (t.shape[1] - 1) * apart + t[0, 0].numel()
    buffer = torch.frombuffer(mmap.mmap(-1, elements * t.element_size()), dtype=t.dtype)
    return buffer.as_strided(t.shape, (0, apart, t.shape[3], 1)).copy_(t)
