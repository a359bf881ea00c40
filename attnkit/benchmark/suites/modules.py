"""Modules of attnkit.nn beside torch.nn's, with the same weights: as they are, and compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

import attnkit.nn
from attnkit.benchmark.cases import DTYPES, OPERATIONS, Case
from attnkit.benchmark.numeric import TOLERANCE, check_tensors
from attnkit.benchmark.tasks import Suite, Work

LIBRARIES = {"attnkit": attnkit.nn, "torch": nn}
EAGER = "-eager"  # of a name, in the suite of compiled modules
FORWARD_OF_LAYER = 4  # a feed-forward layer is so many times as wide as the model
MOST_STEPS = 4.0  # of the tolerance: a layer rounds several times where a kernel does once


def _attention(library: object, case: Case) -> nn.Module:
    width = case.heads * case.head_dim
    module: nn.Module = library.MultiheadAttention(  # type: ignore[attr-defined]
        width, case.heads, batch_first=True
    )
    return module


def _layer(library: object, case: Case) -> nn.Module:
    width = case.heads * case.head_dim
    module: nn.Module = library.TransformerEncoderLayer(  # type: ignore[attr-defined]
        width, case.heads, FORWARD_OF_LAYER * width, dropout=0.0, batch_first=True
    )
    return module


KINDS: dict[str, Callable[[object, Case], nn.Module]] = {
    "attention": _attention,
    "encoder layer": _layer,
}


@dataclass
class ModuleSubject:
    """A module of each library, made when it is asked for, and what float64 gives."""

    case: Case
    seed: int
    compiled: bool = False

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> ModuleSubject:
        """Nothing is drawn before it is needed."""
        return cls(case, seed)

    @classmethod
    def of_compiled(cls, case: Case, seed: int = 0) -> ModuleSubject:
        """The same, under torch.compile."""
        return cls(case, seed, compiled=True)

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """x and the gradient of the output, [B, L, width] in float64; 0 where there is padding."""
        case, draw = self.case, torch.Generator().manual_seed(self.seed)
        shape = case.batch, case.queries, case.heads * case.head_dim
        x, dout = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
        return x, dout * self._real()

    def prepare(self, name: str, operation: str) -> Work:
        """See ``Contest``."""
        dtype, device = DTYPES[self.case.dtype], self.case.device
        module = self._module(name.removesuffix(EAGER), operation, dtype)
        compiled = self.compiled and not name.endswith(EAGER)
        call = self._work(module, operation, dtype, device, compiled)
        if not compiled:
            return Work(call, call)
        start = time.perf_counter()
        call()
        return Work(call, call, extra={"compile_seconds": time.perf_counter() - start})

    def check(self, name: str, operation: str, results: Sequence[Tensor]) -> dict[str, float]:
        """See ``Contest``."""
        module = self._module("torch", operation, torch.float64)
        expected = self._work(module, operation, torch.float64, "cpu")()
        what = f"{name} {operation} on {self.case.label}"
        named = dict(
            zip(("out", "dx", "dweight"), zip(results, expected, strict=True), strict=False)
        )
        return check_tensors(what, named, MOST_STEPS * TOLERANCE[self.case.dtype])

    def ran(self, name: str) -> str:
        """See ``Contest``."""
        family = name.removesuffix(EAGER)
        if family != "attnkit":
            return "torch.nn"
        like = torch.empty(
            (self.case.batch, self.case.heads, self.case.queries, self.case.head_dim),
            dtype=DTYPES[self.case.dtype],
            device=self.case.device,
        )
        return str(attnkit.explain(like, like, like).chosen)

    def _module(self, family: str, operation: str, dtype: torch.dtype) -> nn.Module:
        kind = KINDS[operation.rpartition(" ")[0]]
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            weights = kind(nn, self.case).state_dict()
        module = kind(LIBRARIES[family], self.case)
        module.load_state_dict(weights)
        return module.to(self.case.device if dtype != torch.float64 else "cpu", dtype)

    def _real(self) -> Tensor:
        """[B, L, 1], 1 for tokens and 0 for padding."""
        lengths = torch.tensor(self.case.lengths())
        return (torch.arange(self.case.queries) < lengths[:, None])[..., None].double()

    def _work(
        self,
        module: nn.Module,
        operation: str,
        dtype: torch.dtype,
        device: str,
        compiled: bool = False,
    ) -> Callable[[], tuple[Tensor, ...]]:
        x, dout = (t.to(device, dtype) for t in self.inputs)
        real, terms = self._real().to(device, dtype), self.case.terms
        padding = (real == 0)[..., 0] if "padded" in terms else None
        causal = None
        if "causal" in terms:
            causal = nn.Transformer.generate_square_subsequent_mask(
                self.case.queries, device=torch.device(device), dtype=dtype
            )
        if padding is not None and causal is not None:
            raise ValueError(f"mask is {self.case.mask!r}, expected full, causal or padded")

        def forward(x: Tensor) -> Tensor:
            hint = causal is not None
            if operation.startswith("attention"):
                masks = {"attn_mask": causal, "key_padding_mask": padding, "is_causal": hint}
                out: Tensor = module(x, x, x, need_weights=False, **masks)[0]
                return out
            out = module(x, src_mask=causal, src_key_padding_mask=padding, is_causal=hint)
            return out  # noqa: RET504  # a Tensor to mypy

        if compiled:
            forward = torch.compile(forward, fullgraph=True, dynamic=False)
        if operation.endswith("inference"):
            module.eval()

            def inference() -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return (forward(x) * real,)

            return inference
        module.train()
        weight = next(module.parameters())
        leaf = x.requires_grad_()

        def step() -> tuple[Tensor, ...]:
            out = forward(leaf)
            gradients = torch.autograd.grad(out, (leaf, weight, *others), dout)
            return (out * real).detach(), *gradients[:2]

        others = tuple(module.parameters())[1:]
        return step


def _flops(case: Case, operation: str) -> float:
    """Of attention and of the linear layers."""
    tokens, width = case.batch * case.queries, case.heads * case.head_dim
    matrices = 4 + (2 * FORWARD_OF_LAYER if operation.startswith("encoder layer") else 0)
    step = operation.endswith("step")
    linear = (3 if step else 1) * 2.0 * tokens * matrices * width * width
    return linear + OPERATIONS["step" if step else "forward"] * case.flops("forward")


def _refusal(name: str, case: Case, operation: str) -> str | None:
    if name.removesuffix(EAGER) not in LIBRARIES:
        raise ValueError(f"implementation is {name!r}, expected one of {', '.join(LIBRARIES)}")
    if case.mask not in ("full", "causal", "padded") or case.kv_heads != case.heads:
        return "a module is measured full, causal or padded, and without grouped heads"
    return None


OPERATIONS_OF_MODULES = tuple(f"{kind} {way}" for kind in KINDS for way in ("inference", "step"))
SUITES = {
    "modules": Suite(
        "modules of attnkit.nn beside torch.nn's",
        OPERATIONS_OF_MODULES,
        lambda operation: tuple(LIBRARIES),
        _refusal,
        ModuleSubject.of,
        _flops,
        "flops",
    ),
    "compile": Suite(
        "the same modules under torch.compile(fullgraph=True), beside themselves without it",
        OPERATIONS_OF_MODULES,
        lambda operation: (*LIBRARIES, *(name + EAGER for name in LIBRARIES)),
        _refusal,
        ModuleSubject.of_compiled,
        _flops,
        "flops",
    ),
}
