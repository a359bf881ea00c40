"""Plants bugs in the Triton kernels, one at a time, and wants the tests to catch every one.

    python tests/mutants_triton.py [words of labels...] [--list] [--jobs N]

Each mutant is one replacement in kernels/; the tests of tests/test_triton.py that are named beside
it then run in the interpreter, on a copy of the package.  Exits with 1 if one survives, with 2 if
the tests fail without any bug, or if a text to replace is not there once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds for the tests of one mutant: a bug may well hang

# A copy of the package does not know that kernels/ is attnkit.kernels; an install does.
LINK = """import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "attnkit.kernels", {path!r}, submodule_search_locations=[{folder!r}])
module = importlib.util.module_from_spec(spec)
sys.modules["attnkit.kernels"] = module
spec.loader.exec_module(module)
"""


class Mutant(NamedTuple):
    label: str
    file: str  # in kernels/
    old: str  # stands there once
    new: str
    tests: str  # what pytest -k takes


MUTANTS = [
    # ---- masks
    Mutant("band: right edge off by one", "parts.py",
           "seen = seen & (j - i <= seq.hi)", "seen = seen & (j - i <= seq.hi + 1)",
           "feature and causal"),
    Mutant("band: left edge off by one", "parts.py",
           "seen = seen & (j - i >= seq.lo)", "seen = seen & (j - i > seq.lo)",
           "feature and window"),
    Mutant("band: full tiles reach one key too far", "parts.py",
           "tl.maximum(m0 + seq.hi + 1, 0) // BLOCK_N",
           "tl.maximum(m0 + seq.hi + 32, 0) // BLOCK_N",
           "feature and causal"),
    Mutant("band: last key of a tile of queries not visited", "parts.py",
           "hi = tl.minimum(hi, last + seq.hi + 1)", "hi = tl.minimum(hi, last + seq.hi)",
           "feature"),
    Mutant("band: full tiles start too early", "parts.py",
           "reached = tl.maximum(last + seq.lo, 0)", "reached = tl.maximum(m0 + seq.lo, 0)",
           "feature and window"),
    Mutant("band: queries of a tile of keys start too late", "parts.py",
           "lo = tl.maximum(lo, n0 - seq.hi)", "lo = tl.maximum(lo, n0 - seq.hi + 32)",
           "feature and causal"),
    Mutant("alignment ignored when Lq != Lk", "parts.py",
           "        off = nk - nq\n", "        off = nk - nk\n", "feature and causal-bottom-right"),
    Mutant("band: window one key wider", "parts.py",
           "    if mask.left is not None:\n        lo = off - mask.left\n",
           "    if mask.left is not None:\n        lo = off - mask.left - 1\n",
           "feature and window"),
    Mutant("lengths are not looked at", "parts.py",
           "nk = tl.minimum(nk, tl.load(mask.lengths + entry))",
           "nk = tl.minimum(nk, tl.load(mask.lengths + entry) + 1)", "feature and lengths"),
    Mutant("keep: holes are overlooked", "parts.py",
           "solid = tl.load(mask.keep_range + entry * 3 + 2)",
           "solid = tl.load(mask.keep_range + entry * 3 + 1)", "feature and keep"),
    Mutant("keep: last kept key forgotten", "parts.py",
           "tl.max(tl.where(kept, j + 1, 0), 0)", "tl.max(tl.where(kept, j, 0), 0)",
           "feature and (keep or left)"),
    Mutant("segments: unequal ids see each other", "parts.py",
           "seen = seen & (a == b)", "seen = seen & (a >= b)", "feature and segments"),
    Mutant("segments: a live tile is skipped", "parts.py",
           "some = some & (q_least <= k_most) & (k_least <= q_most)",
           "some = some & (q_least < k_most) & (k_least < q_most - 1)", "documents"),
    Mutant("blocks: flags of the neighbour", "parts.py",
           "flag = flags + (i // BLOCK).to(tl.int64) * mask.blocks_row + j // BLOCK",
           "flag = flags + (i // BLOCK).to(tl.int64) * mask.blocks_row + (j + 1) // BLOCK",
           "feature and blocks"),
    Mutant("tail: keys past the end are seen", "parts.py",
           "    columns = j < seq.nk\n    seen = rows & columns",
           "    columns = j < seq.nk + 1\n    seen = rows & columns", "feature and plain"),
    Mutant("bool mask: True hides", "parts.py",
           "seen & (load_dense(mask.dense, seq, h, i, j, True) != 0)",
           "seen & (load_dense(mask.dense, seq, h, i, j, True) == 0)", "feature and bool"),
    Mutant("bias: -inf is not hidden", "parts.py",
           ".to(tl.float32) > -INF)", ".to(tl.float32) >= -INF)",
           "row_does_not_see and bias"),
    # ---- strides and heads
    Mutant("dense: stride of the batch for the head", "parts.py",
           "h.to(tl.int64) * dense.head", "h.to(tl.int64) * dense.batch", "feature and bias"),
    Mutant("rows: stride of the head", "parts.py",
           "seq_row.to(tl.int64) * a.row + rows[:, None] * a.row",
           "seq_row.to(tl.int64) * a.row + rows[:, None] * WIDTH", "feature and transposed"),
    Mutant("groups: values of the first head for all", "forward.py",
           "kv.to(tl.int64) * v.head", "(kv * 0).to(tl.int64) * v.head",
           "feature and causal-bottom-right"),
    # ---- scores
    Mutant("softcap: slope forgotten", "parts.py", "slope = 1.0 - t * t", "slope = 1.0 - t",
           "feature and softcap"),
    Mutant("alibi: distance from the wrong place", "parts.py",
           "tl.abs(j - i - seq.off)", "tl.abs(j - i)", "feature and alibi"),
    Mutant("forward: no rescale of what was summed", "forward.py",
           "total = total * fade + tl.sum(p, 1)", "total = total + tl.sum(p, 1)",
           "feature and plain"),
    Mutant("forward: no rescale of the output", "forward.py",
           "acc = acc * fade[:, None]\n    if CAREFUL:", "acc = acc * 1.0\n    if CAREFUL:",
           "feature and plain"),
    Mutant("forward: infinity as the pivot of an empty row", "forward.py",
           "top = tl.zeros([BLOCK_M], tl.float32) + lowest",
           "top = tl.zeros([BLOCK_M], tl.float32) - INF", "feature and bool"),
    Mutant("forward: the sink is not in lse", "forward.py",
           "total = total * fade + tl.math.exp2((sink - pivot) * LOG2E)",
           "total = total * fade", "feature and sinks"),
    Mutant("forward: NaN is not looked for", "forward.py",
           "wrong = wrong | tl.where(total < INF, 0, 1)", "wrong = wrong * 0", "row_does_not_see"),
    # ---- dropout
    Mutant("dropout: counter of the wrong query", "parts.py",
           "i = tl.broadcast_to((i0 + tl.arange(0, M))[:, None]",
           "i = tl.broadcast_to((i0 + 1 + tl.arange(0, M))[:, None]", "feature and dropout"),
    Mutant("dropout: lanes out of order", "parts.py",
           "tl.join(tl.join(r0, r2), tl.join(r1, r3))", "tl.join(tl.join(r0, r1), tl.join(r2, r3))",
           "vector"),
    Mutant("dropout: weights do not grow", "backward.py",
           "            dv = dv * dropout.grow\n", "            dv = dv * 1.0\n",
           "feature and dropout"),
    Mutant("dropout: batch entry for the packed sequence", "parts.py",
           "tl.philox(seed, j4, i, h, seq.number)", "tl.philox(seed, j4, i, h, seq.entry)",
           "feature and packed"),
    # ---- backward
    Mutant("delta: gradient of lse with the wrong sign", "backward.py",
           "total -= tl.load(_row(dlse", "total += tl.load(_row(dlse", "feature and plain"),
    Mutant("dk: not scaled", "backward.py", "_store_tile(dk * how.scale", "_store_tile(dk * 1.0",
           "feature and plain"),
    Mutant("dq: one head of keys for all", "backward.py",
           "        kv = h // sizes.group\n        rows = tl.arange(0, BLOCK_M)\n",
           "        kv = h * 0\n        rows = tl.arange(0, BLOCK_M)\n",
           "feature and causal-bottom-right"),
    Mutant("dbias: only the last batch", "backward.py", "                total += ds\n",
           "                total = ds\n", "feature and bias-per-head"),
    Mutant("low: what a coarse lse lacks is left out", "backward.py",
           "        p = p - low\n", "        p = p - 0.0 * low\n", "very_low"),
    Mutant("packed: tiles of the neighbour", "parts.py",
           "return found, tile - before", "return found, tile - before + 1", "feature and packed"),
    Mutant("packed: sequences after those searched at once are lost", "parts.py",
           "        total += tl.sum(tiles, 0)\n", "", "searched_at_once"),
    Mutant("narrow heads: what rounding took off is forgotten", "parts.py",
           "if WIDTH <= NARROW and", "if WIDTH < NARROW and", "narrow_heads"),
    Mutant("bfloat16: bits are cut off", "parts.py",
           "bits + 0x7FFF + ((bits >> 16) & 1)", "bits", "nearest"),
    Mutant("strides: those of the slopes before they were copied", "host.py",
           "alibi_batch=None if alibi is None else _stride(alibi, 0)",
           "alibi_batch=None if alibi is None else _stride(self.args.alibi, 0)", "what_is_not"),
    Mutant("strides: lengths as if contiguous", "host.py",
           "lengths=None if a.lengths is None else a.lengths.contiguous()", "lengths=a.lengths",
           "what_is_not"),
    Mutant("strides: blocks as if contiguous", "host.py",
           "(blocks if blocks.stride(3) == 1 else blocks.contiguous()).view(torch.uint8)",
           "blocks.view(torch.uint8)", "what_is_not"),
    Mutant("TMA: strides are not looked at", "host.py",
           "if t.data_ptr() % 16 or any(s % 16 or s <= 0 for s in steps):",
           "if t.data_ptr() % 16:", "descriptors"),
    Mutant("TMA: queries of the first head for all", "backward.py",
           "q_tile = desc[0].load([seq.entry, h, m0, 0])",
           "q_tile = desc[0].load([seq.entry, h * 0, m0, 0])", "descriptors"),
    Mutant("forward: rows of the lowest scores count as rows without keys", "forward.py",
           "    lowest = LOWEST\n", "    lowest = -1e30\n", "very_low"),
    Mutant("forward: the tile that is spoilt is not computed again", "forward.py",
           "if real & (tl.load(spoilt + tl.program_id(0), mask=real, other=0) != 0):",
           "if real & (tl.load(spoilt + tl.program_id(0), mask=real, other=0) > 1):",
           "row_does_not_see"),
    # ---- decoding
    Mutant("decoding: longer than the cache", "decode.py",
           "fits = (length >= 0) & (length <= room)", "fits = length >= 0", "cache_does_not_have"),
    Mutant("decoding: pages that there are not", "decode.py",
           "((page >= 0) & (page < cache.rows))", "(page < cache.rows)", "cache_does_not_have"),
    Mutant("decoding: rows that there are not", "decode.py",
           "exist = (row >= 0) & (row < cache.rows)", "exist = row >= 0", "cache_does_not_have"),
    Mutant("decoding: pages before the start are looked at", "decode.py",
           "first = tl.maximum(first, tl.load(step.starts + b))", "first = first",
           "nobody_looks_at"),
    Mutant("decoding: pages in order", "decode.py",
           "page = tl.load(row + j // PAGE, mask=there, other=0).to(tl.int64)",
           "page = tl.load(row + j // PAGE * 0, mask=there, other=0).to(tl.int64)",
           "decoding and pages"),
    Mutant("decoding: chunks are not weighed", "decode.py",
           "weight = tl.math.exp2((x - pivot) * LOG2E)\n        acc",
           "weight = 1.0\n        acc", "decoding"),
    Mutant("decoding: float8 with the wrong bias", "decode.py", "* 256.0", "* 128.0",
           "decoding and float8"),
    Mutant("decoding: position of the first query for all", "decode.py",
           "position = length - queries + query", "position = length - queries + query * 0",
           "decoding and several"),
]  # fmt: skip


def copy_package(to: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "build")
    for folder in ("attnkit", "kernels", "tests"):
        shutil.copytree(ROOT / folder, to / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", to)
    path = str(to / "kernels" / "__init__.py")
    link = LINK.format(path=path, folder=str(to / "kernels"))
    conftest = to / "conftest.py"
    conftest.write_text("import attnkit\n" + link)


def run_tests(package: Path, words: str) -> tuple[str, str]:
    """("passed" | "failed" | "hung", the first failing test)."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-k", words, "--tb=no",
        "-p", "no:cacheprovider", "tests/test_triton.py",
    ]  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=package, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return "hung", ""
    if done.returncode > 1:  # pytest's own errors are not what is looked for here
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
        raise SystemExit(2)
    failed = [line[7:] for line in done.stdout.splitlines() if line.startswith("FAILED ")][:1]
    return ("failed" if done.returncode else "passed"), failed[0].split(" - ")[0] if failed else ""


def try_mutant(mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests catch it, and how."""
    with tempfile.TemporaryDirectory(prefix="attnkit-mutant-") as name:
        package = Path(name)
        copy_package(package)
        path = package / "kernels" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        state, first = run_tests(package, mutant.tests)
        return state != "passed", f"{state} {first}".strip()


def stale(mutants: list[Mutant]) -> list[str]:
    found = []
    for mutant in mutants:
        count = (ROOT / "kernels" / mutant.file).read_text().count(mutant.old)
        if count != 1:
            found.append(f"{mutant.label}: {count} times in {mutant.file}: {mutant.old}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose label holds one of these")
    parser.add_argument("--list", action="store_true", help="print the labels and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in m.label for w in options.words)]
    if options.list:
        print(*(m.label for m in chosen), sep="\n")
        return 0
    wrong = stale(chosen)
    if wrong:
        print("cannot be planted:", *wrong, sep="\n  ")
        return 2

    start = time.monotonic()
    clean = Mutant("none", "parts.py", "\0", "\0", "feature and (plain or causal)")
    caught, how = try_mutant(clean)
    if caught:
        print(f"without any bug the tests fail: {how}")
        return 2
    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (caught, how) in zip(chosen, pool.map(try_mutant, chosen), strict=True):
            print(f"{'caught' if caught else 'MISSED':6}  {mutant.label}  [{how}]", flush=True)
            if not caught:
                survivors.append(mutant.label)
    count = len(chosen)
    print(f"{count - len(survivors)} of {count} caught ({time.monotonic() - start:.0f} s)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
