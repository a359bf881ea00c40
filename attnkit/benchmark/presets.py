"""Named choices of tasks: what to measure, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnkit.benchmark.cases import FEATURES, Case
from attnkit.benchmark.measuring import USUAL, Preset, Settings, everywhere
from attnkit.benchmark.suites import SUITES, generation
from attnkit.benchmark.tasks import Task

CPU_PEERS = ("onnxruntime", "openvino", "flex")
HIDDEN = 2048  # of the FlashAttention-2 paper: heads = HIDDEN / head dim
PAPER_SIZES = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
MASKS = (
    *("causal", "causal+window:256", "padded", "scattered", "documents:4", "blocks:0.5"),
    *(name for name in FEATURES if name != "learned-bias"),
)


def tasks(suite: str, operations: str, cases: Iterable[Case]) -> list[Task]:
    """Each case with each of the operations, which are separated by commas."""
    names = [name.strip() for name in operations.split(",")]
    return [Task(suite, name, case) for case in cases for name in names]


def attention(operations: str, *cases: Case) -> list[Task]:
    """Suites that are called as their operation is."""
    return [Task(name, name, case) for case in cases for name in operations.split()]


def feature_costs(length: int, dim: int, dtype: str, device: str, operations: str) -> list[Task]:
    """Every mask and feature in turn, on one size."""
    shape = Case(1, 8, length, dim, dtype, device=device)
    cases = [replace(shape, mask=mask) for mask in MASKS]
    learned = [replace(shape, mask="learned-bias")] if "step" in operations else []
    return tasks("masks", operations, cases) + tasks("masks", "step", learned)


def decoding(batch: int, kv_heads: int, keys: int, dtype: str = "fp32", cache: str = "full",
             queries: int = 1, device: str = "cpu") -> Case:  # fmt: skip
    """32 query heads of 128 over a cache."""
    return Case(batch, 32, queries, 128, dtype, cache, keys, kv_heads, device=device)


def lengthening(*lengths: int) -> list[Case]:
    """One problem at several lengths, causal: what is drawn against the length."""
    return [Case(1, 4, length, 64, mask="causal") for length in lengths]


def smoke() -> list[Task]:
    """Every suite and operation once, tiny: to see that everything runs."""
    small = Case(1, 2, 65, 16)
    text = Case(1, 4, 8, 16, mask="causal", keys=16)
    return [
        *attention("forward backward step", small, Case(2, 2, 65, 16, "bf16", "padded")),
        *tasks("decode", "decode", [Case(1, 4, 1, 32, "fp32", kind, 130, 2) for kind in
                                    ("full", "paged", "int8")]),
        *tasks("varlen", "forward, step", [Case(3, 2, 65, 16, mask="padded+causal")]),
        *tasks("masks", "forward", [replace(small, mask=mask) for mask in MASKS]),
        *tasks("masks", "step", [replace(small, mask="learned-bias")]),
        *tasks("modules", ", ".join(SUITES["modules"].operations), [Case(2, 2, 33, 16)]),
        *tasks("generation", generation.WRITING, [text]),
        *tasks("overhead", "call, call with gradient", [Case(1, 1, 1, 8)]),
    ]  # fmt: skip


def quick() -> list[Task]:
    """Some of everything that needs no other library."""
    return [
        *attention("forward backward", *everywhere(Case(1, 8, 1024, 64), dtypes="fp32")),
        *attention("forward backward", Case(1, 8, 1024, 64, "bf16", "causal")),
        *attention("forward", Case(8, 12, 128, 64)),
        *attention("step", *lengthening(256, 512, 1024, 2048)),
        *tasks("decode", "decode", [decoding(1, 8, n) for n in (512, 2048, 8192)]),
        *tasks("decode", "decode", [decoding(1, 8, 2048, *kind) for kind in
                                    (("bf16",), ("fp32", "int8"))]),
        *tasks("varlen", "forward", [Case(4, 8, 512, 64, mask="padded")]),
        *tasks("masks", "forward", [Case(1, 4, 1024, 64, mask=mask) for mask in
                                    ("causal", "causal+window:256", "alibi", "softcap", "bias")]),
        *tasks("modules", "encoder layer step", [Case(2, 8, 256, 64, mask="causal")]),
        *tasks("generation", generation.WRITING, [Case(1, 8, 32, 32, mask="causal", keys=64)]),
        *tasks("overhead", "call, call with gradient", [Case(1, 1, 1, 8)]),
    ]  # fmt: skip


def cpu() -> list[Task]:
    """The shapes by which CPU kernels are judged: long, short, padded, every dtype and feature."""
    module = Case(4, 8, 512, 64)
    text = Case(1, 12, 64, 64, mask="causal", keys=128)
    every = "forward backward step"
    shapes = (Case(1, 8, 1024, 64), Case(1, 8, 4096, 64), Case(1, 32, 1024, 128))
    short = (Case(8, 12, 197, 64), Case(8, 12, 577, 64), Case(8, 12, 128, 64), Case(32, 12, 32, 64))
    return [
        *attention(every, *everywhere(*shapes)),
        *attention(every, Case(1, 8, 4096, 128), Case(1, 1, 4096, 64)),
        *attention(every, *everywhere(*short, which="full")),
        *attention(every, *everywhere(Case(8, 8, 1024, 64), which="padded")),
        *attention(every, Case(1, 8, 1024, 64, "fp16")),
        *attention("step", *lengthening(512, 1024, 2048, 4096, 8192)),
        *tasks("decode", "decode", [
            *(decoding(1, 8, n, dtype) for dtype in ("fp32", "bf16") for n in (512, 2048, 8192)),
            *(decoding(1, 8, 4096, kind, queries=n) for kind in ("fp32", "bf16") for n in (2, 16)),
            *(decoding(1, 32, 2048, dtype) for dtype in ("fp32", "bf16")),
            *(decoding(8, 8, 2048, "bf16", cache) for cache in ("full", "paged")),
            *(decoding(1, 8, 2048, "fp32", cache) for cache in ("int8", "fp8")),
        ]),
        *tasks("varlen", "forward, step", everywhere(
            Case(8, 8, 1024, 64), which="padded padded+causal")),
        *feature_costs(2048, 64, "fp32", "cpu", "forward, step"),
        *feature_costs(2048, 128, "bf16", "cpu", "forward, step"),
        *tasks("modules", ", ".join(SUITES["modules"].operations),
               [replace(module, mask=mask) for mask in ("full", "causal", "padded")]),
        *tasks("compile", "encoder layer inference, encoder layer step", [module]),
        *tasks("generation", f"{generation.WRITING}, {generation.HF_WRITING}",
               [text, replace(text, batch=8)]),
        *tasks("overhead", "call, call with gradient", [Case(1, 1, 1, 8)]),
    ]  # fmt: skip


def paper(device: str = "cuda") -> list[Task]:
    """The grid of the FlashAttention-2 and -3 papers: 16k tokens, hidden size 2048."""
    return attention("forward backward", *(
        Case(batch, HIDDEN // dim, length, dim, "bf16", mask, device=device)
        for dim in (64, 128, 256) for mask in ("full", "causal") for batch, length in PAPER_SIZES
    ))  # fmt: skip


def gpu(device: str = "cuda") -> list[Task]:
    """What a GPU is judged by, in minutes: long rows, decoding, features, modules."""
    contexts = (1024, 4096, 16384, 65536, 131072)
    module = Case(8, 16, 1024, 64, "bf16", device=device)
    text = Case(8, 12, 64, 64, "bf16", "causal", 192, device=device)
    long = [
        Case(batch, HIDDEN // 128, length, 128, "bf16", "causal", device=device)
        for batch, length in PAPER_SIZES
    ]
    return [
        *attention("forward backward", *long),
        *tasks("decode", "decode", [
            Case(batch, 64, 1, 128, "bf16", keys=n, kv_heads=8, device=device)
            for batch in (1, 16) for n in contexts if batch * n <= 1 << 20
        ]),
        *tasks("varlen", "forward, step", [Case(8, 16, 2048, 128, "bf16", "padded+causal",
                                                device=device)]),
        *feature_costs(4096, 128, "bf16", device, "forward, step"),
        *tasks("modules", "encoder layer inference, encoder layer step", [module]),
        *tasks("compile", "encoder layer inference, encoder layer step", [module]),
        *tasks("generation", f"{generation.WRITING}, {generation.HF_WRITING}", [text]),
        *tasks("overhead", "call, call with gradient", [Case(1, 1, 1, 8, "bf16", device=device)]),
    ]  # fmt: skip


PRESETS = {
    "smoke": Preset(tuple(smoke()), Settings(rounds=2, min_time=0.001)),  # seconds
    "quick": Preset(tuple(quick()), Settings(rounds=5, min_time=0.02)),  # two minutes, two cores
    "cpu": Preset(tuple(cpu()), Settings(implementations=(*USUAL, *CPU_PEERS))),  # an hour
    "gpu": Preset(tuple(gpu()), Settings(rounds=15, implementations=())),
    "paper": Preset(tuple(paper()), Settings(rounds=15, implementations=())),
}
