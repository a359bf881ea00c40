"""Other libraries' attention, each optional, in the layout and by the name each of them wants.

On a CPU onnxruntime and OpenVINO (``pip install 'attnkit[peers]'``), on a GPU flash-attn, xFormers
and FlashInfer.  Inputs are laid out for a library when it is made, outside of what is timed; the
result is a view of its own buffer.  Those for GPUs were written from the libraries' documentation.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.benchmark.cases import DTYPES, Case, Inputs

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Implementation(NamedTuple):
    """Someone who can do attention."""

    make: Callable[[Case, Inputs], Attention]
    refuses: Callable[[Case, str], str | None]  # (case, operation): the reason; None: it can
    version: Callable[[], str | None]  # None: not installed


# --- GPU -----------------------------------------------------------------------------------------


def flash_attn(case: Case, inputs: Inputs) -> Attention:
    """flash-attn's function on [B, L, H, D]; its causal is bottom-right, the same for a square."""
    from flash_attn import flash_attn_func

    reach = int(case.terms.get("window") or 0) - 1
    causal = "causal" in case.terms
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": (reach, 0 if causal else reach),
        "softcap": case.terms.get("softcap") or 0.0,
        "alibi_slopes": inputs.alibi,
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_slot = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = flash_attn_func(*by_slot, **options)
        return out.transpose(1, 2)

    return attend


def xformers(case: Case, inputs: Inputs) -> Attention:
    """xFormers' memory-efficient attention on [B, L, H, D]."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    bias = LowerTriangularMask() if "causal" in case.terms else None
    group = case.heads // case.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        by_slot = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = memory_efficient_attention(*by_slot, attn_bias=bias)
        return out.transpose(1, 2)

    return attend


def flashinfer(case: Case, inputs: Inputs) -> Attention:
    """FlashInfer's functions for one sequence: [H, D] against a cache, or a prefill [L, H, D]."""
    from flashinfer import single_decode_with_kv_cache, single_prefill_with_kv_cache

    causal = "causal" in case.terms

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (x[0].transpose(0, 1) for x in (k, v))
        if case.queries == 1:
            out: Tensor = single_decode_with_kv_cache(q[0, :, 0], keys, values)
            return out[None, :, None]
        out = single_prefill_with_kv_cache(q[0].transpose(0, 1), keys, values, causal=causal)
        return out.transpose(0, 1)[None]

    return attend


def _only_on_gpu(module: str, allowed: set[str], forward_only: bool = False) -> Any:
    """The refusals of a GPU library that takes no other terms of a mask than ``allowed``."""

    def refuses(case: Case, operation: str) -> str | None:
        if not _installed(module):
            return "it is not installed"
        if not case.device.startswith("cuda"):
            return "it needs a GPU"
        if case.dtype not in ("bf16", "fp16"):
            return f"it does not take {case.dtype}"
        if forward_only and (operation not in ("forward", "decode") or case.batch > 1):
            return "its plain functions take one sequence, forward"
        return _lacks(case, allowed)

    return refuses


# --- CPU -----------------------------------------------------------------------------------------


def onnxruntime(case: Case, inputs: Inputs) -> Attention:
    """onnxruntime's MultiHeadAttention operator, on [B, L, H D] in buffers of its own."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    def described(name: str, length: int, width: int) -> Any:
        shape = [case.batch, length, width]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    widths = case.heads * case.head_dim, case.heads * case.value_dim
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["out"], domain="com.microsoft",
        num_heads=case.heads, unidirectional=int("causal" in case.terms),
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "attention",
        [
            described("q", case.queries, widths[0]),
            described("k", case.keys, widths[0]),
            described("v", case.keys, widths[1]),
        ],
        [described("out", case.queries, widths[1])],
    )
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    group = case.heads // case.kv_heads
    for name, x in zip("qkv", (inputs.q, *_repeated(inputs, group)), strict=True):
        packed = x.transpose(1, 2).reshape(case.batch, x.shape[2], -1).contiguous()
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(packed.numpy()))
    rows = torch.empty(case.batch, case.queries, widths[1])
    held = ort.OrtValue.ortvalue_from_numpy(rows.numpy())  # the same memory
    binding.bind_ortvalue_output("out", held)
    out = rows.view(case.batch, case.queries, case.heads, case.value_dim).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        session.run_with_iobinding(binding)
        return out

    attend.kept = held  # type: ignore[attr-defined]
    return attend


def openvino(case: Case, inputs: Inputs) -> Attention:
    """OpenVINO's scaled_dot_product_attention, compiled for the CPU."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as op

    kind = {"fp32": ov.Type.f32, "bf16": ov.Type.bf16, "fp16": ov.Type.f16}[case.dtype]
    hint = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}[case.dtype]
    parameters = [op.parameter(list(x.shape), kind) for x in inputs[:3]]
    group, heads = case.heads // case.kv_heads, []
    for node, dim in zip(parameters[1:], (case.head_dim, case.value_dim), strict=True):
        if group > 1:  # the pattern that its plugin folds into a grouped kernel
            shape = [case.batch, case.kv_heads, group, case.keys, dim]
            wide = op.unsqueeze(node, op.constant(np.array([2], np.int64)))
            wide = op.broadcast(
                wide, op.constant(np.array(shape, np.int64)), broadcast_spec="BIDIRECTIONAL"
            )
            to = np.array([0, case.heads, case.keys, dim], np.int64)
            node = op.reshape(wide, op.constant(to), True)
        heads.append(node)
    attention = op.scaled_dot_product_attention(
        parameters[0], *heads, causal="causal" in case.terms
    )
    model = ov.Model([op.result(attention)], parameters, "attention")
    request = ov.Core().compile_model(model, "CPU", {
        "INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY",
    }).create_infer_request()  # fmt: skip
    out = torch.empty(
        case.batch, case.heads, case.queries, case.value_dim, dtype=DTYPES[case.dtype]
    )
    kept = [_as_openvino(ov, x.contiguous(), kind) for x in (*inputs[:3], out)]
    for index, (tensor, _) in enumerate(kept[:3]):
        request.set_input_tensor(index, tensor)
    request.set_output_tensor(0, kept[3][0])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        request.infer()
        return out

    attend.kept = kept  # type: ignore[attr-defined]  # OpenVINO does not own what it reads
    return attend


def _as_openvino(ov: Any, x: Tensor, kind: Any) -> tuple[Any, Any]:
    """A tensor of OpenVINO on the memory of ``x``, and the array that keeps the memory."""
    if x.dtype == torch.bfloat16:  # which numpy does not have
        array = x.view(torch.int16).numpy()
        return ov.Tensor(array, list(x.shape), kind), array
    array = x.numpy()
    return ov.Tensor(array, shared_memory=True), array


def _repeated(inputs: Inputs, group: int) -> tuple[Tensor, Tensor]:
    """Keys and values with a copy for each query head of a group."""
    if group == 1:
        return inputs.k, inputs.v
    return inputs.k.repeat_interleave(group, 1), inputs.v.repeat_interleave(group, 1)


def _only_on_cpu(modules: tuple[str, ...], dtypes: tuple[str, ...]) -> Any:
    """The refusals of a CPU library for inference, which takes causal and nothing else."""

    def refuses(case: Case, operation: str) -> str | None:
        missing = [name for name in modules if not _installed(name)]
        if missing:
            return f"{' and '.join(missing)} not installed"
        if case.device != "cpu":
            return "it is measured on the CPU only"
        if operation not in ("forward", "decode"):
            return "it has no backward"
        if case.dtype not in dtypes:
            return f"it does not take {case.dtype}"
        return _lacks(case, {"causal"})

    return refuses


# --- shared --------------------------------------------------------------------------------------


def _lacks(case: Case, allowed: set[str]) -> str | None:
    """The terms of the case's mask that are not allowed, as a sentence."""
    terms = set(case.terms) - {"full"} - allowed
    if "causal" in case.terms and case.queries != case.keys:
        return "its causal mask is aligned elsewhere"
    return f"it takes no {' and no '.join(sorted(terms))}" if terms else None


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version_of(distribution: str) -> Callable[[], str | None]:
    def version() -> str | None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    return version


PEERS: dict[str, Implementation] = {
    "flash-attn": Implementation(
        flash_attn,
        _only_on_gpu("flash_attn", {"causal", "window", "softcap", "alibi"}),
        _version_of("flash-attn"),
    ),
    "xformers": Implementation(
        xformers, _only_on_gpu("xformers", {"causal"}), _version_of("xformers")
    ),
    "flashinfer": Implementation(
        flashinfer,
        _only_on_gpu("flashinfer", {"causal"}, forward_only=True),
        _version_of("flashinfer-python"),
    ),
    "onnxruntime": Implementation(
        onnxruntime,
        _only_on_cpu(("onnxruntime", "onnx"), ("fp32",)),
        _version_of("onnxruntime"),
    ),
    "openvino": Implementation(
        openvino,
        _only_on_cpu(("openvino",), ("fp32", "bf16", "fp16")),
        _version_of("openvino"),
    ),
}


def versions() -> dict[str, str]:
    """The versions of the optional libraries that are installed, by name."""
    found = {name: peer.version() for name, peer in PEERS.items()}
    others = {name: _version_of(name)() for name in ("triton", "transformers")}
    return {name: version for name, version in (found | others).items() if version is not None}
