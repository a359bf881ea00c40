"""Choice of the backend for a call: the first, in order, with nothing against it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnkit.backends import cpu, cuda, reference, triton
from attnkit.spec import NO_CACHE, AttentionSpec, CacheArgs, TensorArgs

BACKENDS: dict[str, ModuleType] = {
    "cpu": cpu,
    "cuda": cuda,
    "triton": triton,
    "reference": reference,
}

_forced: ContextVar[str | None] = ContextVar("attnkit_backend", default=None)
_tracing = torch.compiler.is_dynamo_compiling


class _Traced(threading.local):
    """The forced name again, for Dynamo: it cannot trace a ContextVar, but it guards on this."""

    name: str | None = None


_traced = _Traced()


def forced_backend() -> str | None:
    """Name of the backend that `use_backend` asked for in this context, or None."""
    return _traced.name if _tracing() else _forced.get()


def select(q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec) -> ModuleType:
    """The backend for this call.

    Raises:
        NotImplementedError: the forced backend, or every backend, has something against the call.
    """
    name = _traced.name if _tracing() else _forced.get()
    if name is None:
        for backend in BACKENDS.values():
            if backend.supports(q, k, v, args, spec) is None:
                return backend
    return _forced_or_refuse(name, explain(q, k, v, args, spec))


def select_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
) -> ModuleType:
    """The backend for a decoding step; raises as `select` does."""
    return _first("supports_decode", q, k, v, args, spec, cache)


def select_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> ModuleType:
    """The backend that writes new keys and values into a cache; raises as `select` does."""
    return _first("supports_append", k, v, k_cache, v_cache)


def select_extend(*call: Any) -> ModuleType | None:
    """The backend that appends and attends in one operator; None where that takes two."""
    name = forced_backend()
    for each, backend in BACKENDS.items():
        if (name is None or name == each) and backend.supports_extend(*call) is None:
            return backend
    return None


def _first(question: str, *call: Any) -> ModuleType:
    """The first backend, of those that `use_backend` leaves, with nothing against the call."""
    name = forced_backend()
    reasons: dict[str, str | None] = {}
    for each, backend in BACKENDS.items():
        if name is None or name == each:
            reasons[each] = getattr(backend, question)(*call)
            if reasons[each] is None:
                return backend
    return _forced_or_refuse(name, reasons)


def _forced_or_refuse(name: str | None, reasons: dict[str, str | None]) -> ModuleType:
    if name is None:
        against = "; ".join(f"{each}: {reason}" for each, reason in reasons.items())
        raise NotImplementedError(f"no backend can serve this call ({against})")
    if reasons[name] is not None:
        raise NotImplementedError(f"backend {name!r} cannot serve this call: {reasons[name]}")
    return BACKENDS[name]


def explain(
    q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec
) -> dict[str, str | None]:
    """Each backend's answer to a call: None, or the reason why it cannot serve it."""
    return {name: backend.supports(q, k, v, args, spec) for name, backend in BACKENDS.items()}


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every attention call in the block (or in the decorated function) on one backend.

    The override belongs to this thread and context: other threads and asyncio tasks do not see it.
    A compiled function sees the override of its thread, and is compiled anew for each.

    Raises:
        TypeError: name is not a string.
        ValueError: there is no such backend.
        NotImplementedError: raised by a call in the block that the backend cannot serve.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {type(name).__name__} {name!r}, expected a str")
    if name not in BACKENDS:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(map(repr, BACKENDS))}")
    token = None if _tracing() else _forced.set(name)
    saved, _traced.name = _traced.name, name
    try:
        yield
    finally:
        _traced.name = saved
        if token is not None:
            _forced.reset(token)


def status() -> dict[str, str | None]:
    """Of each backend None where this machine can use it, or the reason why not."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    answers: dict[str, str | None] = {}
    for device in devices:  # one that serves a small call on any device is usable
        x = torch.zeros(1, 1, 1, 64, device=device)  # a head dim that every backend has
        for name, reason in explain(x, x, x, TensorArgs(), AttentionSpec(1.0)).items():
            if name not in answers or reason is None:
                answers[name] = reason
    return answers


def available_backends() -> list[str]:
    """Names of the backends that this machine can use, in the order in which they are tried."""
    return [name for name, reason in status().items() if reason is None]
