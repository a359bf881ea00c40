"""Everything that only a machine with a GPU can show, in one go and without a network.

    make gpu-check DIR=results          or  python bench/gpu_check.py results

Numbers first, bfloat16 before the rest: every case of the contract on the `triton` backend against
float64, forward and all gradients, then decoding.  Then determinism: the same call RUNS times, bit
for bit.  Then times, beside PyTorch's own attention with each of its backends forced.  Writes
DIR/gpu_check.json and DIR/gpu_check.md, and exits with 1 if a number is wrong.  What does not fit
into --minutes is left out, and the report says so.

    TRITON_INTERPRET=1 python bench/gpu_check.py DIR --device cpu --cases 3     tries the script
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnkit
from attnkit import dispatch, testing
from attnkit.spec import NO_CACHE, AttentionSpec, TensorArgs
from attnkit.testing import Case, Inputs, Results

RUNS = 20
HIDDEN = 2048  # of the grid of the FlashAttention-2 paper: heads = HIDDEN / head dim
GRID = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
PEERS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.skipped: list[str] = []

    def left(self, what: str) -> bool:
        """Whether there is time for `what`; notes it where not."""
        if time.monotonic() < self.end:
            return True
        self.skipped.append(what)
        return False


def moved(value: Any, device: str) -> Any:
    """Tensors and named tuples of them, on another device and in the same strides."""
    if isinstance(value, Tensor):
        if device == "cpu":
            return value
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if 0 not in value.stride():
            return out.copy_(value)
        narrow = value
        for d in range(value.dim()):
            if value.stride(d) == 0:
                narrow = narrow.narrow(d, 0, min(1, value.shape[d]))
        return narrow.to(device).expand(value.shape)
    if isinstance(value, tuple):
        return type(value)(*(moved(v, device) for v in value))
    return value


def numbers(device: str, clock: Clock, most: int) -> list[dict[str, Any]]:
    """Every case of the contract, against float64."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for case in testing.cases()[:most]:
            if not clock.left(f"numbers {dtype} {case}"):
                continue
            x, want = testing.expected(case, dtype)
            try:
                got = testing.run("triton", moved(x, device))
                got = Results(*(None if t is None else t.cpu() for t in got))
                wrong = testing.complaints(got, want)
            except Exception as error:  # a kernel that fails is a result, not the end
                wrong = [f"{type(error).__name__}: {error}"[:500]]
            rows.append({"case": str(case), "dtype": str(dtype), "wrong": wrong})
            if wrong:
                print(f"WRONG {dtype} {case}: {'; '.join(wrong)}", flush=True)
    return rows


def decoding(device: str, clock: Clock, most: int) -> list[dict[str, Any]]:
    """Decoding over contiguous caches of several lengths, against float64 on the CPU."""
    rows = []
    shapes = [((300, 1, 4096), 1, 64, 8), ((77, 513), 4, 128, 2), ((20, 2050), 1, 256, 4)][:most]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for lengths, queries, dim, group in shapes:
            if not clock.left(f"decoding {dtype} {lengths}"):
                continue
            g = torch.Generator().manual_seed(0)
            batch, room = len(lengths), max(lengths) + 3
            q = torch.randn(batch, 2 * group, queries, dim, generator=g).to(dtype)
            k, v = (torch.randn(batch, 2, room, dim, generator=g).to(dtype) for _ in range(2))
            spec = AttentionSpec(dim**-0.5, right=0, bottom_right=True)
            args = TensorArgs(lengths=torch.tensor(lengths, dtype=torch.int32))
            want = dispatch.BACKENDS["reference"].decode(
                *(t.double() for t in (q, k, v)), args, spec, NO_CACHE
            )
            here = (t.to(device) for t in (q, k, v))
            out, lse = dispatch.BACKENDS["triton"].decode(
                *here, moved(args, device), spec, NO_CACHE
            )
            error = float((out.cpu().double() - want[0]).abs().max())
            limit = 8 * torch.finfo(dtype).eps * float(want[0].abs().max())
            finite = want[1].isfinite()
            off = float((lse.cpu().double() - want[1])[finite].abs().max())
            wrong = [] if error <= limit and off < 1e-2 else [f"error {error:.3g}, lse {off:.3g}"]
            rows.append({"case": f"decode {lengths} {dim}", "dtype": str(dtype), "wrong": wrong})
    return rows


def determinism(device: str, clock: Clock, runs: int) -> list[dict[str, Any]]:
    """The same call again and again, bit for bit."""
    rows = []
    length = 1000 if device != "cpu" else 40
    for options in ({"right": 0}, {"bias": "float:1hqk", "sinks": True}, {"dropout_p": 0.2}):
        if not clock.left(f"determinism {options}"):
            continue
        case = Case("", 2, 4, 2, length, length, 64, **options)  # type: ignore[arg-type]
        x: Inputs = moved(testing.build(case, torch.float16), device)
        first = testing.run("triton", x)
        same = all(
            a is None or torch.equal(a, b)
            for _ in range(runs - 1)
            for a, b in zip(first, testing.run("triton", x), strict=True)
        )
        wrong = [] if same else ["the bits of two runs differ"]
        rows.append({"case": f"determinism {options}", "dtype": "float16", "wrong": wrong})
    return rows


def milliseconds(call: Callable[[], Any], least: float = 0.1) -> float:
    """Median time of a call on the GPU."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times, start = [], time.monotonic()
    while time.monotonic() - start < least or len(times) < 5:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return sorted(times)[len(times) // 2]


@contextlib.contextmanager
def _chosen(name: str) -> Iterator[Callable[..., Tensor]]:
    if name == "attnkit triton":
        with attnkit.use_backend("triton"):
            yield attnkit.scaled_dot_product_attention
    else:
        with sdpa_kernel(PEERS[name]):
            yield torch.nn.functional.scaled_dot_product_attention


def times(clock: Clock) -> list[dict[str, Any]]:
    """The grid of the FlashAttention-2 paper in bfloat16, forward and backward, in TFLOP/s."""
    rows = []
    for dim in (64, 128, 256):
        for causal in (True, False):
            for batch, length in GRID:
                shape = (batch, HIDDEN // dim, length, dim)
                flop = 4 * batch * shape[1] * length**2 * dim / (2 if causal else 1)
                for name in ("attnkit triton", *PEERS):
                    what = f"{name} D{dim} {'causal' if causal else 'full'} {batch}x{length}"
                    if not clock.left(what):
                        continue
                    row: dict[str, Any] = {"what": what}
                    try:
                        with _chosen(name) as call:
                            row |= _timed(call, shape, causal, flop)
                    except Exception as error:
                        row["failed"] = f"{type(error).__name__}: {error}"[:300]
                    rows.append(row)
                    print(row, flush=True)
    return rows


def _timed(
    call: Callable[..., Tensor], shape: tuple[int, ...], causal: bool, flop: float
) -> dict[str, float]:
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    forward = milliseconds(lambda: call(q, k, v, is_causal=causal))
    for t in (q, k, v):
        t.requires_grad_()
    out = call(q, k, v, is_causal=causal)
    backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    return {
        "forward ms": forward,
        "forward TFLOP/s": flop / forward / 1e9,
        "backward ms": backward,
        "backward TFLOP/s": 2.5 * flop / backward / 1e9,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["# GPU check", "", *(f"- {k}: {v}" for k, v in report["machine"].items()), ""]
    for name in ("numbers", "decoding", "determinism"):
        rows = report[name]
        wrong = [r for r in rows if r["wrong"]]
        lines.append(f"{name}: {len(rows) - len(wrong)} of {len(rows)} right.")
        lines += [f"- {r['dtype']} {r['case']}: {'; '.join(r['wrong'])}" for r in wrong]
        lines.append("")
    if report["times"]:
        lines += ["| Call | Forward TFLOP/s | Backward TFLOP/s |", "|---|---|---|"]
        for r in report["times"]:
            if "failed" in r:
                lines.append(f"| {r['what']} | {r['failed'].splitlines()[0][:60]} | |")
            else:
                speeds = (f"{r[f'{way} TFLOP/s']:.0f}" for way in ("forward", "backward"))
                lines.append(f"| {r['what']} | {' | '.join(speeds)} |")
        lines.append("")
    if report["skipped"]:
        lines.append(f"Left out for lack of time: {len(report['skipped'])} measurements.")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="only the first cases")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that this PyTorch can use: nothing was checked")
        return 2
    reason = dispatch.BACKENDS["triton"].supports(
        *(torch.zeros(1, 1, 1, 16, device=options.device) for _ in range(3)),
        TensorArgs(), AttentionSpec(1.0),
    )  # fmt: skip
    if reason is not None:
        print(f"the triton backend cannot be checked here: {reason}")
        return 2
    import triton

    gpu = options.device != "cpu"
    # numbers may take five minutes of nine: the rest is for determinism and times
    clock, all_of_it = Clock(options.minutes * 5 / 9), Clock(options.minutes)
    few = options.cases < 100
    report: dict[str, Any] = {
        "machine": {
            "device": torch.cuda.get_device_name() if gpu else platform.processor() or "CPU",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "numbers": numbers(options.device, clock, options.cases),
        "decoding": decoding(options.device, clock, options.cases),
        "determinism": determinism(options.device, all_of_it, 2 if few else RUNS),
        "times": times(all_of_it) if gpu else [],
    }
    report["skipped"] = clock.skipped + all_of_it.skipped
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.folder / "gpu_check.md").write_text(markdown(report))
    print(markdown(report))
    rows = report["numbers"] + report["decoding"] + report["determinism"]
    return int(any(r["wrong"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
