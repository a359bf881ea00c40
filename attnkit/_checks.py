"""What the public functions ask of their arguments, once, at the door.

`plain` is the quick look at every call; everything else here runs only where it says no.  The type
of an exception is the one PyTorch raises; its message names the argument, what was found and what
was expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnkit.masks import describe

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
SDPA: Any = (
    torch._C._nn.scaled_dot_product_attention
)  # torch's; override_sdpa has its own in its place
_STRIDED = torch.strided
_any_autocast = torch._C._is_any_autocast_enabled


def plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k, v are ordinary dense tensors of one dtype and device with nothing to be done.

    Their shapes are not looked at.  False only means that `settle` has to look closer.
    """
    return (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and ((q.is_cpu and k.is_cpu and v.is_cpu) or q.device == k.device == v.device)
        and q.dtype is k.dtype is v.dtype
        and q.dtype in FLOATS
        and not (q.is_nested or k.is_nested or v.is_nested)
        and q.layout is k.layout is v.layout is _STRIDED
        and not _any_autocast()
        and F.scaled_dot_product_attention is SDPA
    )


def settle(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as autocast wants them; raises for what is no dense tensor, or does not match.

    Raises:
        TypeError: not a tensor.
        NotImplementedError: nested, sparse, complex or another dtype without kernels.
        RuntimeError: dtypes or devices differ, integers, a DTensor, context_parallel is active.
    """
    named = (("query", q), ("key", k), ("value", v))
    for name, t in named:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is {describe(t)}, expected a Tensor")
        if t.is_nested:
            raise NotImplementedError(
                f"{name} is a nested tensor, expected a dense one: use attnkit.varlen_attention, "
                "or pad and pass a mask"
            )
        if t.layout is not _STRIDED:
            raise NotImplementedError(f"{name} has layout {t.layout}, expected torch.strided")
        if is_sharded(t):
            raise RuntimeError(
                f"{name} is a DTensor, of which each rank holds a shard, expected a local tensor: "
                "attention over shards would miss the keys of the other ranks"
            )
    if F.scaled_dot_product_attention is not SDPA:
        refuse_context_parallel()
    if q.device != k.device or q.device != v.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but query is on "
            f"{q.device}, key on {k.device}, value on {v.device}"
        )
    if _any_autocast():
        q, k, v = (autocast(t) for t in (q, k, v))
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but query has "
            f"{q.dtype}, key {k.dtype}, value {v.dtype}"
        )
    if q.dtype not in FLOATS:
        found = f"query has dtype {q.dtype}, expected float32, bfloat16, float16 or float64"
        if q.is_complex() or q.is_floating_point():
            raise NotImplementedError(found)
        raise RuntimeError(found)
    return q, k, v


def autocast(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype that torch.autocast asks for; float64 stays what it is."""
    kind = tensor.device.type
    if (
        torch.is_autocast_enabled(kind)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    ):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def refuse_context_parallel() -> None:
    """RuntimeError if PyTorch's context_parallel has put its own function in the place of SDPA."""
    module = getattr(F.scaled_dot_product_attention, "__module__", None) or ""
    if module.startswith("torch.distributed"):
        raise RuntimeError(
            "query, key and value are shards of a sequence inside torch's context_parallel, "
            "expected whole sequences: a plain call would attend to the local shard only"
        )


def is_sharded(t: Any) -> bool:
    """Whether it is a DTensor, whose module is not imported for the question."""
    return type(t).__name__ == "DTensor"


def is_causal_bias(mask: Any) -> bool:
    """Whether it is a torch.nn.attention.bias.CausalBias, whose module takes a second to import."""
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """RuntimeError unless q [B, Hq, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] fit together."""
    qs, ks, vs = q.shape, k.shape, v.shape
    if (
        len(qs) == len(ks) == len(vs) == 4
        and ks[:3] == vs[:3]
        and qs[0] == ks[0]
        and qs[3] == ks[3]
        and ks[1] > 0
        and qs[1] % ks[1] == 0
    ):
        return
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim() != 4:
            raise RuntimeError(
                f"{name} has shape {tuple(t.shape)}, expected 4 dimensions: "
                "(batch, heads, length, head dim)"
            )
    batch, hq, _, _ = q.shape
    check_head_dim(q, k)
    check_lengths(k, v)
    for name, t in (("key", k), ("value", v)):
        if t.shape[0] != batch:
            raise RuntimeError(f"{name} has batch size {t.shape[0]}, query has {batch}")
    if k.shape[1] != v.shape[1]:
        raise RuntimeError(f"value has {v.shape[1]} heads, key has {k.shape[1]}")
    check_groups(hq, k.shape[1], "key")


def check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    """RuntimeError unless q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], and Hkv divides Hq."""
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim() != 3:
            raise RuntimeError(
                f"{name} has shape {tuple(t.shape)}, expected 3 dimensions: "
                "(all tokens, heads, head dim)"
            )
    check_head_dim(q, k)
    if k.shape[:2] != v.shape[:2]:
        raise RuntimeError(
            f"value has {v.shape[0]} tokens and {v.shape[1]} heads, key has {k.shape[0]} and "
            f"{k.shape[1]}"
        )
    check_groups(q.shape[1], k.shape[1], "key")


def check_head_dim(q: Tensor, k: Tensor) -> None:
    """RuntimeError unless query and key have one head dim."""
    if q.shape[-1] != k.shape[-1]:
        raise RuntimeError(f"key has head dim {k.shape[-1]}, query has {q.shape[-1]}")


def check_lengths(k: Tensor, v: Tensor) -> None:
    """RuntimeError unless there are as many values as keys."""
    if k.shape[-2] != v.shape[-2]:
        raise RuntimeError(f"value has length {v.shape[-2]}, key has {k.shape[-2]}")


def check_groups(hq: int, h: int, name: str) -> None:
    """RuntimeError unless hq query heads can share h heads of `name`."""
    if hq % h if h else hq:
        raise RuntimeError(
            "Number of heads in key and value must divide the number of heads in query, but "
            f"{name} has {h} heads and query has {hq}"
        )


def number(name: str, value: Any) -> float:
    """A float out of a float, an int or a 0-d tensor; TypeError for anything else."""
    if isinstance(value, (float, int)) and not isinstance(value, bool):
        return value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
        if value.requires_grad:
            raise TypeError(
                f"{name} is a tensor that requires a gradient, expected a float: multiply the "
                "query by it instead"
            )
        return float(value)
    raise TypeError(f"{name} is {describe(value)}, expected a float")


def flag(name: str, value: Any) -> bool:
    """A bool; TypeError for anything else, ints included."""
    if isinstance(value, bool):
        return value
    raise TypeError(f"{name} is {describe(value)}, expected a bool")


def probability(value: Any) -> float:
    """A dropout probability: RuntimeError outside [0, 1], and for NaN."""
    p = number("dropout_p", value)
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(
            f"dropout_p is {p}: dropout probability has to be between 0 and 1, but got {p}"
        )
    return p


def cap(value: Any) -> float:
    """A softcap: ValueError if negative, NaN or infinite; 0 is off."""
    softcap = number("softcap", value)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}, expected a finite number above 0, or 0 for none")
    return softcap


def count(name: str, value: Any) -> int:
    """An int; TypeError for anything else, bools included."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]
    raise TypeError(f"{name} is {describe(value)}, expected an int")


def window(value: Any) -> tuple[int | None, int | None]:
    """(left, right) with None for no limit, out of flash-attn's -1; ValueError below that."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"window is {describe(value)}, expected a pair (left, right) of ints")
    left, right = (count("window", bound) for bound in value)
    if left < -1 or right < -1:
        raise ValueError(f"window is {(left, right)}, expected bounds of 0 or more, or -1 for none")
    return None if left == -1 else left, None if right == -1 else right


def indices(name: str, value: Any, q: Tensor, dim: int) -> Tensor | None:
    """Indices along dimension `dim` of q as int64 [n] on its device; IndexError out of range."""
    if value is None:
        return None
    size = q.shape[dim]
    if isinstance(value, Tensor):
        if value.dim() != 1 or value.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name} is {describe(value)}, expected int64 indices of shape (n,)")
        found = value.to(torch.int64)
        if found.is_cpu and not torch.compiler.is_compiling() and found.numel():
            low, high = (int(x) for x in found.aminmax())
        else:
            low = high = 0  # a look at the values would make a GPU wait
    else:
        listed = [value] if isinstance(value, int) else value
        if not isinstance(listed, (list, tuple, range)):
            raise TypeError(f"{name} is {describe(value)}, expected ints or an int64 tensor")
        listed = [count(name, each) for each in listed]
        low, high = min(listed, default=0), max(listed, default=0)
        found = torch.tensor(listed, dtype=torch.int64)
    if found.numel() and (low < 0 or high >= size):
        raise IndexError(f"{name} has indices from {low} to {high}, expected 0 to {size - 1}")
    return found.to(q.device)


def offsets(name: str, value: Any, packed: Tensor) -> Tensor:
    """Cumulative lengths as int32 [N + 1]; their values are looked at on the CPU only."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {describe(value)}, expected an int32 or int64 tensor")
    if value.dim() != 1 or value.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected (sequences + 1,)")
    if value.device != packed.device:
        raise RuntimeError(f"{name} is on {value.device}, query is on {packed.device}")
    if value.is_cpu and not torch.compiler.is_compiling() and type(value) is Tensor:
        listed = value.tolist()
        if listed[0] != 0:
            raise ValueError(f"{name} starts with {listed[0]}, expected 0")
        if any(b < a for a, b in pairwise(listed)):
            raise ValueError(
                f"{name} falls from one entry to the next, expected it to rise: {listed}"
            )
        if listed[-1] > packed.shape[0]:
            raise ValueError(
                f"{name} ends with {listed[-1]}, expected at most the number of tokens, "
                f"{packed.shape[0]}"
            )
    return value.to(torch.int32)


def per_sequence(
    name: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], q: Tensor
) -> None:
    """Check a tensor with an entry for each sequence of a cache."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        raise TypeError(f"{name} is {describe(value)}, expected a tensor of {dtype}")
    if value.shape != shape:
        raise RuntimeError(f"{name} has shape {tuple(value.shape)}, expected {shape}")
    if value.device != q.device:
        raise RuntimeError(f"{name} is on {value.device}, query is on {q.device}")


def seed_tensor(seed: Any, q: Tensor) -> Tensor:
    """The dropout's seed, int64 [] on q's device; drawn from torch's generator if None."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=q.device)
    if isinstance(seed, int) and not isinstance(seed, bool):
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed is {seed}, expected a number of 64 bits")
        signed = seed - 2**64 if seed >= 2**63 else seed
        return torch.tensor(signed, dtype=torch.int64, device=q.device)
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(
            f"seed is {describe(seed)}, expected an int or an int64 tensor of one element"
        )
    if seed.device != q.device:
        raise RuntimeError(f"seed is on {seed.device}, query is on {q.device}")
    return seed.reshape(())


def per_head(name: str, value: Any, shapes: Sequence[tuple[int, ...]], q: Tensor) -> Tensor:
    """One floating-point number per query head, in float32 (float64 for float64 calls)."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{name} is {describe(value)}, expected a floating-point tensor")
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(str(s) for s in shapes)
        raise RuntimeError(f"{name} has shape {tuple(value.shape)}, expected {wanted}")
    if value.device != q.device:
        raise RuntimeError(f"{name} is on {value.device}, query is on {q.device}")
    return value


def addend(name: str, value: Any, q: Tensor) -> Tensor:
    """A mask tensor: bool, or float to be added to the scores, in q's dtype or float32.

    Raises:
        TypeError: not a tensor.
        RuntimeError: another dtype or device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"argument '{name}' must be Tensor, not {type(value).__name__}")
    if value.device != q.device:
        raise RuntimeError(f"{name} is on {value.device}, query is on {q.device}")
    if value.dtype == torch.bool or value.dtype == q.dtype:
        return value
    if value.dtype == torch.float32:
        # the kernels add in the scores' own precision; the gradient finds its way back
        return value.double() if q.dtype == torch.float64 else value
    if value.is_floating_point() and value.dtype != torch.float64 and _any_autocast():
        return value.float()
    raise RuntimeError(
        f"Expected {name} dtype to be bool or float or to match query dtype, but got "
        f"{name}.dtype: {value.dtype} and query.dtype: {q.dtype}"
    )


def check_broadcast(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """RuntimeError unless `tensor` can be stretched to the scores' shape [..., queries, keys]."""
    found = tensor.shape
    n = len(shape) - len(found)
    if n < 0 or any(m not in (1, s) for m, s in zip(found, shape[n:], strict=True)):
        raise RuntimeError(
            f"{name} has shape {tuple(found)}, expected one that broadcasts to the scores' "
            f"{tuple(shape)}, the last two being (queries, keys)"
        )
