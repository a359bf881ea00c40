"""Compiles the Triton kernels for GPUs that are not there, and holds the result against budgets.

    python bench/compile_matrix.py                  the table of the main kernels on sm_90
    python bench/compile_matrix.py --write          writes it to bench/results/machine_code.md
    python bench/compile_matrix.py --budgets        compiles the matrix anew and writes its budgets
                                                    to bench/results/machine_code.json
    python bench/compile_matrix.py --check          compiles it, exits with 1 where one is exceeded
    python bench/compile_matrix.py --full           compiles every combination (hours)

A kernel is compiled as a launch would specialise it: pointers and strides divisible by 16, column
strides of 1, and for each feature the arguments that attnkit.kernels.host would pass.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not said

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import machine_code  # noqa: E402
from attnkit.kernels import backward, forward, launch, parts  # noqa: E402
from attnkit.kernels import decode as decoding  # noqa: E402

from attnkit import testing  # noqa: E402

RESULTS = ROOT / "bench" / "results"
ARCHS = (80, 86, 89, 90, 100, 120, 942)
NAMES = {"bf16": 2, "fp16": 2, "fp32": 4}
FEATURES = (
    "right", "left", "lengths", "keep", "segments", "blocks", "bool", "bias", "alibi", "softcap",
    "sinks", "dropout", "packed",
)  # fmt: skip
FLOP = {"forward": 4, "dkdv": 8, "dq": 6}  # per entry of a tile and column
OTHERS = (
    "forward_again", "rows", "dbias", "dkdv_again", "dq_again", "decode", "merge", "keep_range",
)  # fmt: skip


class Build(NamedTuple):
    """One kernel, compiled one way."""

    kernel: str  # one of FLOP or OTHERS
    arch: int  # 80, 90, 100, ...; 942 is AMD's gfx942
    dim: int
    dtype: str
    features: tuple[str, ...] = ()
    config: launch.Config | None = None  # None: the launch table's

    def __str__(self) -> str:
        name = f"{self.kernel} sm_{self.arch} d{self.dim} {self.dtype}".replace("sm_942", "gfx942")
        return " ".join([name, *self.features])

    def chosen(self) -> launch.Config:
        """The configuration that it is compiled with."""
        if self.config is not None:
            return self.config
        major = None if self.arch == 942 else (self.arch // 10, self.arch % 10)
        family = launch.family(major)
        biased = self.kernel.startswith("forward") and "bias" in self.features
        name = self.kernel.removesuffix("_again")
        name = name if name in FLOP else "dq"
        name = "forward bias" if biased else name
        found = launch.choose(name, family, self.dim, NAMES[self.dtype])
        if self.kernel not in ("forward", "dkdv") or "packed" in self.features or self.arch == 942:
            found = found._replace(tma=False)
        return found


def signature(build: Build) -> dict[str, Any]:
    """The arguments of the kernel: types, None, constants (a tuple ("constant", value))."""
    config, dtype, f = build.chosen(), build.dtype, set(build.features)
    step, rows = "i32:16", parts.Rows("*fp32:16", "i32", "i32")
    array = parts.Array(f"*{dtype}:16", step, step, step)
    dense = parts.Dense("*u8:16", step, step, step, ("constant", 1))
    bias = parts.Dense(f"*{dtype}:16", step, step, step, ("constant", 1))

    def when(feature: str, what: Any) -> Any:
        return what if feature in f else None

    mask = parts.Mask(
        left=when("left", "i32"),
        right=when("right", "i32"),
        bottom_right=("constant", 1) if f & {"right", "left"} else None,
        lengths=when("lengths", "*i32:16"),
        keep=when("keep", "*u8:16"),
        keep_row=when("keep", step),
        keep_range=when("keep", "*i32:16") if "packed" not in f else None,
        q_segments=when("segments", "*i32:16"),
        k_segments=when("segments", "*i32:16"),
        segments_q=when("segments", step),
        segments_k=when("segments", step),
        blocks=when("blocks", "*u8:16"),
        blocks_batch=when("blocks", "i32"),
        blocks_head=when("blocks", "i32"),
        blocks_row=when("blocks", "i32"),
        dense=when("bool", dense),
        cu_q=when("packed", "*i32:16"),
        cu_k=when("packed", "*i32:16"),
        sequences=when("packed", "i32"),
    )
    how = parts.Score(
        scale="fp32",
        softcap=when("softcap", "fp32"),
        inverse_softcap=when("softcap", "fp32"),
        alibi=when("alibi", "*fp32:16"),
        alibi_batch=when("alibi", "i32"),
        bias=when("bias", bias),
    )
    masked = bool(f - {"alibi", "softcap", "sinks", "dropout"})
    tall = config.block_n if build.kernel == "forward" else config.block_m
    block = [1, 1, tall, build.dim]
    if build.kernel in ("decode", "merge", "keep_range"):
        return cache_signature(build)
    described = (f"tensordesc<{dtype}{block}>".replace(" ", ""),) * 2 if config.tma else None
    constants = {
        "D": build.dim,
        "DV": build.dim,
        "BLOCK_D": build.dim,
        "BLOCK_DV": build.dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "FOLD": not f & {"softcap", "alibi", "bias"},
        "MOST": 64 if "packed" in f else 1,
        "HOW": "ieee",
        "SUM_Q": "alibi" in f,
        "SUM_K": "softcap" in f,
    }
    part = parts.Dense("*fp32:16", step, step, "i32", ("constant", 1))
    return {
        "q": array, "k": array, "v": array, "out": array, "dout": array, "lse": rows,
        "desc": described, "sinks": when("sinks", "*fp32:16"), "mask": mask,
        "how": how, "dropout": when("dropout", parts.Dropout("*i64:16", "i32", "fp32")),
        "sizes": parts.Sizes("i32", "i32", "i32", "i32", "i32"), "delta": rows, "pivot": rows,
        "low": rows if "bias" in f or build.kernel == "dbias" else None, "dlse": rows, "part": part,
        "batches": "i32", "heads": "i32", "steps_b": "i32", "steps_h": "i32", "tiles_n": "i32",
        "spoilt": "*i32:16" if masked or "again" in build.kernel else None, "dk_out": array,
        "dv_out": array, "dq_out": array, "kv_heads": "i32",
        **{name: ("constant", value) for name, value in constants.items()},
    }  # fmt: skip


def cache_signature(build: Build) -> dict[str, Any]:
    """`signature` of the kernels for decoding, whose features stand for others.

    right, left: the band; keep, alibi, softcap, sinks as always; packed: pages; lengths: starts;
    segments: int8; blocks: float8; bool: several queries.
    """
    f = set(build.features)

    def when(feature: str, what: Any) -> Any:
        return what if feature in f else None

    eight = "*u8:16" if "blocks" in f else "*i8:16" if "segments" in f else None
    cache = decoding.Cache(
        eight or f"*{build.dtype}:16", "i32:16", "i32:16", "i32:16",
        "*fp32:16" if eight else None, "i32", "i32:16", "i32",
    )  # fmt: skip
    step = decoding.Step(
        lengths="*i32:16", starts=when("lengths", "*i32:16"), table=when("packed", "*i32:16"),
        table_row=when("packed", "i32"), index=None, keep=when("keep", "*u8:16"),
        keep_row=when("keep", "i32"), left=when("left", "i32"), right=when("right", "i32"),
        scale="fp32", softcap=when("softcap", "fp32"), inverse_softcap=when("softcap", "fp32"),
        alibi=when("alibi", "*fp32:16"), alibi_batch=when("alibi", "i32"),
    )  # fmt: skip
    constants = {
        "D": build.dim, "DV": build.dim, "BLOCK_D": build.dim, "BLOCK_DV": build.dim, "BLOCK_M": 16,
        "BLOCK_N": launch.decode_block(build.dim, NAMES[build.dtype]), "PAGE": 64, "PAGES": 8,
        "HOW": "ieee",
        "SIZE": 1024 if build.kernel == "keep_range" else decoding.CHUNK, "FP8": "blocks" in f,
        "MANY": "bool" in f,
    }  # fmt: skip
    counts = dict.fromkeys(("heads", "group", "queries", "splits", "lk"), "i32")
    strides = dict.fromkeys(("q_batch", "q_head", "q_row"), "i32:16")
    strides |= dict.fromkeys(("out_batch", "out_head", "out_row"), "i32:16")
    out = "*i32:16" if build.kernel == "keep_range" else f"*{build.dtype}:16"
    return {
        "q": f"*{build.dtype}:16", "k": cache, "v": cache, "part": "*fp32:16", "keep": "*u8:16",
        "part_lse": "*fp32:16", "step": step, "sinks": when("sinks", "*fp32:16"), "out": out,
        "lengths": "*i32:16", "lse": "*fp32:16", **counts, **strides,
        **{name: ("constant", value) for name, value in constants.items()},
    }  # fmt: skip


def compile_kernel(build: Build) -> Any:
    """Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    homes = {
        "forward": forward,
        "forward_again": forward,
        "decode": decoding,
        "merge": decoding,
        "keep_range": parts,
    }
    module = homes.get(build.kernel, backward)
    kernel = getattr(module, f"{build.kernel}_kernel")
    wanted = signature(build)
    types: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}

    def settle(path: tuple[int, ...], value: Any) -> Any:
        if isinstance(value, tuple) and value[:1] == ("constant",):
            constants[path] = value[1]
            return "constexpr"
        if value is None:
            constants[path] = None
            return "constexpr"
        if isinstance(value, tuple):
            parts_of = [settle((*path, n), part) for n, part in enumerate(value)]
            return type(value)(*parts_of) if hasattr(value, "_fields") else tuple(parts_of)
        name, _, divisor = value.partition(":")
        if divisor:
            hints[path] = [["tt.divisibility", int(divisor)]]
        return name

    for n, name in enumerate(kernel.arg_names):
        types[name] = settle((n,), wanted[name])
    source = ASTSource(kernel, types, constexprs=constants, attrs=hints)
    config = build.chosen()
    options = {"num_warps": config.warps, "num_stages": config.stages}
    amd = build.arch == 942
    target = GPUTarget("hip", "gfx942", 64) if amd else GPUTarget("cuda", build.arch, 32)
    if build.kernel == "decode":
        options |= {"debug": True, "sanitize_overflow": False}
    return triton.compile(source, target=target, options=options)


def compile_and_listen(build: Build) -> tuple[Any, str]:
    """`compile_kernel`, afresh, and what ptxas says meanwhile."""
    from triton import knobs

    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        return compile_kernel(build), log.getvalue()


def measure(build: Build) -> dict[str, float]:
    """Registers, spills, blocks and bounds of one build."""
    compiled, said = compile_and_listen(build)
    if build.arch == 942:
        text = compiled.asm["amdgcn"]
        found = {key: re.search(rf"\.{key}:\s+(\d+)", text) for key in
                 ("vgpr_count", "vgpr_spill_count")}  # fmt: skip
        registers, spills = (int(m.group(1)) if m else 0 for m in found.values())
        return {"registers": registers, "spills": spills}
    config = build.chosen()
    useful = FLOP.get(build.kernel, 0) * config.block_m * config.block_n * build.dim
    arch = build.arch if build.arch in machine_code.MACHINES else 89
    report = machine_code.analyse(
        compiled.asm["cubin"], config.warps, arch, compiled.metadata.shared, useful,
        compiled.asm["ttgir"],
    )  # fmt: skip
    numbers: dict[str, float] = {
        "registers": report.registers,
        "shared": report.shared,
        "blocks": report.blocks,
        "spills": report.spills,
        "serialised": said.count("wgmma.mma_async instructions are serialized"),
    }
    if report.loops:
        hot = report.hot
        numbers |= {
            "hot spills": hot.spills,
            "hgmma": hot.counts["hgmma"],
            "overlapped": round(hot.overlapped),
            "resident": round(hot.resident),
            "serial": round(hot.serial),
        }
    return numbers


def attempt(build: Build) -> dict[str, Any]:
    """`measure`, or what the compiler says instead."""
    try:
        return measure(build)
    except Exception as error:
        while error.__cause__ is not None:  # Triton wraps the reason once for each inlined call
            error = error.__cause__  # type: ignore[assignment]
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def excess(build: Build, found: dict[str, Any], budget: dict[str, Any] | None) -> list[str]:
    """What is worse than its budget, a sentence each; 2% of room for another version of ptxas.

    Whatever the budget, and without one (None), it has to compile, and to fit a multiprocessor as
    often as the launch table promises.
    """
    budget = found if budget is None else budget
    wrong = [found["failed"]] if "failed" in found else []
    promised = build.chosen().resident if build.kernel in FLOP else 1
    if found.get("blocks", promised) < promised:
        wrong.append(f"{found['blocks']} blocks, {promised} promised by the launch table")
    if found.get("serialised", 0) > budget.get("serialised", 0):
        wrong.append("ptxas serialises its matrix products")
    if budget.get("hgmma", 0) and not found.get("hgmma", 0):
        wrong.append("there is no HGMMA in its hottest loop")
    wrong += [
        f"{name}: {found[name]}, {budget.get(name, 0)} allowed"
        for name in ("registers", "spills", "hot spills")
        if found.get(name, 0) > budget.get(name, 0) * 1.02 + 2
    ]
    wrong += [
        f"{name}: {found.get(name, 0)}, {budget[name]} wanted"
        for name in ("blocks", "resident", "serial")
        if found.get(name, 0) < budget.get(name, 0) * 0.98
    ]
    return wrong


def matrix() -> list[Build]:
    """What CI compiles: MAIN, each kernel for each target and head dim, and each pair of features.

    In 16 bits: float32 without the tensor cores compiles for minutes (it is part of --full).
    """
    builds = list(MAIN)
    for n, (kernel, arch, dim) in enumerate(itertools.product(FLOP, ARCHS, (64, 128))):
        features = ((), ("right",))[n % 3 > 0]
        builds.append(Build(kernel, arch, dim, ("bf16", "fp16")[n % 2], features))
    builds += [Build(kernel, arch, 256, "bf16") for kernel in FLOP for arch in (80, 90, 942)]
    axes: dict[str, Any] = {
        "kernel": (*FLOP, "dbias", "rows"),
        "arch": ARCHS,
        "dim": (64, 128),
        "dtype": ("bf16", "fp16"),
        "band": ((), ("right",), ("right", "left")),
        "hide": ((), ("lengths",), ("keep",), ("segments",), ("blocks",), ("packed",)),
        "dense": ((), ("bool",), ("bias",)),
        "score": ((), ("alibi",), ("softcap",)),
        "sinks": ((), ("sinks",)),
        "dropout": ((), ("dropout",)),
    }
    for row in testing.pairwise(axes):
        kernel, arch, dim, dtype, *chosen = (row[name] for name in axes)
        features = tuple(itertools.chain(*chosen))
        if kernel == "dbias":
            features = (*(f for f in features if f not in ("bool", "bias")), "bias")
        if "packed" in features and set(features) & {"bool", "bias"}:  # are not served together
            features = tuple(f for f in features if f != "packed")
        builds.append(Build(kernel, arch, dim, dtype, features))
    builds += [Build(kernel, 90, 128, "bf16", (f,)) for kernel in FLOP for f in FEATURES]
    stored = ((), ("segments",), ("blocks",))  # of a cache: as it is, int8, float8
    for n, arch in enumerate(ARCHS):
        rest = ("forward_again", "dkdv_again", "dq_again", "merge", "keep_range")
        builds += [Build(kernel, arch, 64, "bf16", ("right",)) for kernel in rest]
        builds.append(Build("decode", arch, 128, "bf16", ("right", "packed", *stored[n % 3])))
        builds.append(Build("decode", arch, 64, "fp16", ("left", "bool", *stored[(n + 1) % 3])))
    return list({str(b): b for b in builds}.values())


MAIN = [
    *(Build("forward", 90, d, "bf16", ("right",)) for d in (64, 128, 256)),
    Build("forward", 90, 128, "bf16"),
    Build("forward", 90, 128, "bf16", ("lengths",)),
    Build("forward", 90, 128, "bf16", ("keep",)),
    Build("forward", 90, 128, "bf16", ("right", "left")),
    Build("forward", 90, 128, "bf16", ("bias",)),
    *(Build("dkdv", 90, d, "bf16", ("right",)) for d in (64, 128)),
    *(Build("dq", 90, d, "bf16", ("right",)) for d in (64, 128)),
]  # fmt: skip

HEAD = """# Machine code of the Triton kernels

What `python bench/compile_matrix.py` reads from kernels compiled for sm_90 (Triton {version}), on a
machine without a GPU.  No kernel ran: the bounds are those of `bench/machine_code.py`, in TFLOP/s
at {count} multiprocessors and {ghz} GHz, where the tensor cores reach 949.  They say which
configuration to try, not how long a call takes.  Blocks are those that fit one multiprocessor;
spills are instructions, in all of the kernel and in its hottest loop.

| Kernel | Tile, warps, stages | Regs | Blocks | Spills (hot) | Overlapped | Resident | Serial |
|---|---|---|---|---|---|---|---|
"""
PEERS = """
Kernels of others, compiled and read in the same way (overlapped / resident / serial): Triton's
tutorial 893/893/460 (D 64, causal) and 949/626/626 (D 128), flash-attn's Triton kernel 949/524/524,
FlagGems 949/494/494, flash-linear-attention 949/509/509, vLLM's unified kernel 686/402/402.
"""


def table(builds: list[Build]) -> str:
    """The rows of the report, compiled one after the other."""
    lines = []
    for build in builds:
        n, c = measure(build), build.chosen()
        tile = f"{c.block_m}x{c.block_n}, {c.warps}, {c.stages}{' TMA' if c.tma else ''}"
        name = f"{build.kernel} D {build.dim} {build.dtype} {' '.join(build.features) or 'full'}"
        lines.append(
            f"| {name} | {tile} | {n['registers']} | {n['blocks']} | {n['spills']} "
            f"({n['hot spills']}) | {n['overlapped']} | {n['resident']} | {n['serial']} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--budgets", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    if options.budgets or options.full or options.check:
        builds = matrix()
        if options.full:
            some = itertools.product(
                FLOP, ARCHS, (64, 128, 256), NAMES, itertools.combinations(FEATURES, 2)
            )
            builds += [Build(*row) for row in some if set(row[4]) != {"packed", "bias"}]
        found = {}
        with ProcessPoolExecutor(options.jobs) as pool:
            for build, numbers in zip(builds, pool.map(attempt, builds), strict=True):
                found[str(build)] = numbers
                print(f"{build}  {numbers}", flush=True)
        if options.budgets:
            path = RESULTS / "machine_code.json"
            path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        failed = [name for name, numbers in found.items() if "failed" in numbers]
        if options.check:
            budgets = json.loads((RESULTS / "machine_code.json").read_text())
            for build in builds:
                name = str(build)
                wrong = excess(build, found[name], budgets.get(name))
                failed += [f"{name}: {'; '.join(wrong)}"] if wrong else []
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{len(builds)} compiled in {used.ru_utime + used.ru_stime:.0f} s of CPU time")
        print(f"{len(failed)} wrong", *failed, sep="\n")
        return int(bool(failed))
    rows = table(MAIN)
    if options.write:
        import triton

        m = machine_code.MACHINES[90]
        head = HEAD.format(version=triton.__version__, count=m.count, ghz=m.ghz)
        (RESULTS / "machine_code.md").write_text(head + rows + PEERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
