"""Who is measured: attnkit, PyTorch in each of its ways, the naive formula, and other libraries.

An implementation makes, for a case, a function (q, k, v) -> out.  What it cannot do it refuses with
a sentence, before anything is built.  The libraries of ``peers`` are optional: one that is not
installed says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnkit
from attnkit.benchmark import peers
from attnkit.benchmark.cases import DTYPES, Case, Inputs, structured_mask
from attnkit.benchmark.machine import describe_machine
from attnkit.benchmark.peers import Attention, Implementation

SEED = 1234  # of dropout, so that it can be checked
NAIVE_COPIES = 6  # score matrices that the naive forward and backward hold at once
NAIVE_SHARE = 0.5  # of the machine's memory that they may take


def call_options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments that ``attnkit.attention`` takes for a case."""
    terms = case.terms
    return {
        "mask": structured_mask(case, inputs),
        "bias": inputs.bias,
        "softcap": terms.get("softcap") or 0.0,
        "sinks": inputs.sinks,
        "alibi": inputs.alibi,
        "dropout_p": terms.get("dropout") or 0.0,
        "seed": SEED if "dropout" in terms else None,
    }


def ours(case: Case, inputs: Inputs) -> Attention:
    """attnkit: the drop-in function where it can say the mask, else the full call."""
    if case.structure <= {"causal"} and not case.features:
        causal = "causal" in case.terms
        grouped = case.kv_heads != case.heads

        def drop_in(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attnkit.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )

        return drop_in
    options = call_options(case, inputs)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnkit.attention(q, k, v, **options)

    return attend


def without_features(case: Case, inputs: Inputs) -> Attention:
    """attnkit with nothing but q, k and v: what a feature is compared with."""
    return lambda q, k, v: attnkit.attention(q, k, v)


def torch_sdpa(case: Case, inputs: Inputs) -> Attention:
    """PyTorch's own fused function; any mask but causal as a tensor, built once."""
    causal = case.structure == {"causal"} and not case.features
    mask = None if causal else dense_mask(case, inputs)
    grouped = case.kv_heads != case.heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )

    return attend


def folded(case: Case, inputs: Inputs) -> Attention:
    """torch's function with the query heads of a group as more queries of one head."""
    shape = case.batch, case.kv_heads, case.heads // case.kv_heads * case.queries

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q.reshape(*shape, case.head_dim), k, v)
        return out.view(case.batch, case.heads, case.queries, case.value_dim)

    return attend


def _forced(backend: SDPBackend) -> Callable[[Case, Inputs], Attention]:
    def make(case: Case, inputs: Inputs) -> Attention:
        attend = torch_sdpa(case, inputs)

        def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(q, k, v)

        return forced

    return make


def naive(case: Case, inputs: Inputs) -> Attention:
    """softmax(scores) v, line by line; the mask is built once."""
    hidden = ~case.visible() if case.structure else None
    bias = float_bias(case, inputs)
    cap = case.terms.get("softcap")
    sinks = None if inputs.sinks is None else inputs.sinks[:, None, None]
    group = case.heads // case.kv_heads
    scale = case.head_dim**-0.5

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-2, -1) * scale  # [B, Hq, Lq, Lk]
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.to(scores.dtype).expand(*scores.shape[:3], 1)
            return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v

    return attend


def flex(case: Case, inputs: Inputs) -> Attention:
    """PyTorch's FlexAttention, compiled, with a block mask and a score function."""
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = _compiled_flex()
    block_mask = None
    if case.structure:
        seen = case.visible()

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return seen[b if seen.shape[0] > 1 else 0, 0, i, j]

        batch = case.batch if seen.shape[0] > 1 else None
        block_mask = create_block_mask(
            visible, batch, None, case.queries, case.keys, device=case.device
        )
    cap, alibi, bias = case.terms.get("softcap"), inputs.alibi, inputs.bias
    score = None
    if case.features:

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if cap is not None:
                s = cap * torch.tanh(s / cap)
            if alibi is not None:
                s = s - alibi[h] * (i - j).abs()
            return s if bias is None else s + bias[0, h, i, j]

    grouped = case.kv_heads != case.heads
    options = {"block_mask": block_mask, "score_mod": score, "enable_gqa": grouped}
    return lambda q, k, v: compiled(q, k, v, **options)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def float_bias(case: Case, inputs: Inputs) -> Tensor | None:
    """ALiBi and bias as one tensor that is added to the scores, [1, H, Lq, Lk]; None without."""
    bias = inputs.bias
    if inputs.alibi is not None:
        i = torch.arange(case.queries, device=case.device)[:, None]
        distance = (i - torch.arange(case.keys, device=case.device)).abs()
        slope = -inputs.alibi[:, None, None] * distance
        slope = slope.to(DTYPES[case.dtype])[None]
        bias = slope if bias is None else bias + slope
    return bias


def dense_mask(case: Case, inputs: Inputs) -> Tensor | None:
    """What ``attn_mask`` has to be: bool or float, as small as broadcasting allows; None: all."""
    bias = float_bias(case, inputs)
    if case.structure == {"padded"} or case.structure == {"scattered"}:
        seen: Tensor | None = case.visible(0, 1)  # [B, 1, 1, Lk]
    else:
        seen = case.visible() if case.structure else None
    if bias is None:
        return seen
    return bias if seen is None else bias.masked_fill(~seen, float("-inf"))


# --- what each refuses --------------------------------------------------------------------------


def _needs_memory(case: Case, operation: str) -> str | None:
    scores = case.batch * case.heads * case.queries * case.keys * DTYPES[case.dtype].itemsize
    need, most = NAIVE_COPIES * scores, NAIVE_SHARE * describe_machine().memory_bytes
    if need <= most:
        return None
    return f"its score matrices need {need / 2**30:.1f} GiB, over half of the machine's memory"


def _not_naive(case: Case, operation: str) -> str | None:
    if "dropout" in case.terms:
        return "it drops other weights, so its numbers cannot be checked"
    if "learned-bias" in case.terms and operation != "forward":
        return None
    return _needs_memory(case, operation)


def _not_torch(case: Case, operation: str) -> str | None:
    lacking = case.features & {"softcap", "sinks"}
    if lacking:
        return f"it has no {' and no '.join(sorted(lacking))}"
    if "dropout" in case.terms:
        return "it drops other weights, so its numbers cannot be checked"
    return None


def _not_forced(backend: SDPBackend) -> Callable[[Case, str], str | None]:
    on_cpu = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)

    def refuses(case: Case, operation: str) -> str | None:
        if case.device == "cpu" and backend not in on_cpu:
            return "it needs a GPU"
        if backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) and (
            case.device != "cpu" and (case.structure - {"causal"} or case.features)
        ):
            return "it takes no mask but causal"
        if backend == SDPBackend.MATH:
            return _not_torch(case, operation) or _needs_memory(case, operation)
        return _not_torch(case, operation)

    return refuses


def _not_folded(case: Case, operation: str) -> str | None:
    if case.kv_heads == case.heads:
        return "there are no grouped heads to fold"
    if case.structure or case.features:
        return "folded heads take no mask here"
    return None


def _not_flex(case: Case, operation: str) -> str | None:
    if case.device == "cpu" and operation != "forward":
        return "it has no backward on a CPU"
    lacking = case.features & {"sinks", "dropout"}
    if lacking:
        return f"it has no {' and no '.join(sorted(lacking))}"
    if case.dtype == "fp64":
        return "it does not compile for fp64"
    return None


def _torch_version() -> str:
    return str(torch.__version__)


SDPA = {
    "torch:math": SDPBackend.MATH,
    "torch:flash": SDPBackend.FLASH_ATTENTION,
    "torch:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch:cudnn": SDPBackend.CUDNN_ATTENTION,
}

IMPLEMENTATIONS: dict[str, Implementation] = {
    "attnkit": Implementation(ours, lambda case, operation: None, lambda: attnkit.__version__),
    "torch": Implementation(torch_sdpa, _not_torch, _torch_version),
    "naive": Implementation(naive, _not_naive, _torch_version),
    **{
        name: Implementation(_forced(backend), _not_forced(backend), _torch_version)
        for name, backend in SDPA.items()
    },
    "torch:folded": Implementation(folded, _not_folded, _torch_version),
    "flex": Implementation(flex, _not_flex, _torch_version),
    **peers.PEERS,
}


def find(name: str) -> Implementation:
    """An implementation by its name.

    ``attnkit:reference`` (or another backend's name after the colon) forces that backend.

    Raises:
        ValueError: there is none of this name.
    """
    if name in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[name]
    family, _, backend = name.partition(":")
    if family != "attnkit" or not backend:
        known = ", ".join([*IMPLEMENTATIONS, "attnkit:<backend>"])
        raise ValueError(f"implementation is {name!r}, expected one of {known}")
    whole = IMPLEMENTATIONS["attnkit"]

    def make(case: Case, inputs: Inputs) -> Attention:
        attend = whole.make(case, inputs)

        def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with attnkit.use_backend(backend):
                return attend(q, k, v)

        return forced

    return whole._replace(make=make)


def implementation(name: str, case: Case, inputs: Inputs) -> Attention:
    """The function (q, k, v) -> out of an implementation on a case; errors as ``find``."""
    return find(name).make(case, inputs)


def refusal(name: str, case: Case, operation: str) -> str | None:
    """Why an implementation cannot do an operation on a case; None if it can."""
    return find(name).refuses(case, operation)


def ran(name: str, case: Case, inputs: Inputs) -> str:
    """The backend that serves an implementation on a case: ``cpu``, ``reference``, ``torch``..."""
    family, _, backend = name.partition(":")
    if family != "attnkit" or backend:
        return backend or family
    chosen = attnkit.explain(*inputs[:3], **call_options(case, inputs)).chosen
    if chosen is None:
        raise NotImplementedError(f"no backend serves {case.label}")
    return chosen
