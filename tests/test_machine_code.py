"""What compiling shows of the Triton kernels: every target, within the budgets of each."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from attnkit import testing
from attnkit.backends import triton
from attnkit.spec import AttentionSpec, CacheArgs, TensorArgs

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    not triton.INSTALLED or triton.INTERPRETED,
    reason="an installed Triton is needed, and not its interpreter",
)
LOOP = """
        /*0000*/                   MOV R1, 0x1 ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
        /*0040*/                   MUFU.EX2 R5, R5 ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0080*/              @!P0 BRA `(.L_x_2) ;
        /*0090*/                   BRA `(.L_x_1) ;
"""


def load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def machine_code():
    return load("machine_code")


@pytest.fixture(scope="module")
def compile_matrix():
    return load("compile_matrix")


def test_a_wait_out_of_line_belongs_to_its_loop(machine_code):
    code, labels = machine_code.parse(LOOP)
    assert [len(body) for body in machine_code.natural_loops(code, labels)] == [8, 2]


def test_counts(machine_code):
    code, _ = machine_code.parse(LOOP)
    c = machine_code.count(code)
    assert (c["mma"], c["mufu"], c["flop"]) == (1, 1, 2 * 64 * 128 * 16 / 4)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [(128, 100, 8, 2), (255, 16, 8, 1), (255, 96, 4, 2), (255, 120, 4, 1)],
)
def test_resident_blocks(machine_code, registers, shared, warps, blocks):
    machine = machine_code.MACHINES[90]
    assert machine_code.resident_blocks(registers, shared * 1024, warps, machine) == blocks


BUDGETS = json.loads((ROOT / "bench" / "results" / "machine_code.json").read_text())
QUICK = "forward sm_90 d64 bf16 right"


def test_the_main_kernel(compile_matrix):
    build = next(b for b in compile_matrix.MAIN if str(b) == QUICK)
    found = compile_matrix.attempt(build)
    assert compile_matrix.excess(build, found, BUDGETS[QUICK]) == []
    worse = [{"blocks": 1}, {"serialised": 1}, {"hgmma": 0}, {"hot spills": 3}, {"registers": 300}]
    for change in worse:
        assert compile_matrix.excess(build, {**found, **change}, BUDGETS[QUICK]), change


def test_the_budgets_are_of_the_matrix(compile_matrix):
    """`python bench/compile_matrix.py --check` compiles all of it; CI does that."""
    assert {str(b) for b in compile_matrix.MAIN} <= set(BUDGETS)
    assert set(BUDGETS) <= {str(b) for b in compile_matrix.matrix()}


def test_goals_of_the_main_kernels():
    """Two blocks per multiprocessor and no spill in the hot loop, where that was promised."""
    for dim, resident, blocks in ((64, 893, 2), (128, 949, 2), (256, 664, 1)):
        numbers = BUDGETS[f"forward sm_90 d{dim} bf16 right"]
        assert numbers["resident"] >= resident
        assert numbers["blocks"] >= blocks
        assert numbers["hot spills"] == 0
    for dim in (64, 128):
        assert BUDGETS[f"dkdv sm_90 d{dim} bf16 right"]["resident"] >= 949
    full = BUDGETS["forward sm_90 d128 bf16"]["resident"]
    for masks in ("lengths", "keep", "right left"):
        assert BUDGETS[f"forward sm_90 d128 bf16 {masks}"]["resident"] > 0.9 * full
    assert BUDGETS["forward sm_90 d128 bf16 bias"]["serial"] >= 499


def test_nothing_failed_to_compile():
    assert [name for name, numbers in BUDGETS.items() if "failed" in numbers] == []


def test_main_loops_use_the_matrix_units_of_hopper(compile_matrix):
    """Warpgroups' instructions, which ptxas does not serialise.

    Known to fall short: dense bool masks, and blocks, of which no loop with products is found.
    """
    for build in compile_matrix.matrix():
        numbers = BUDGETS.get(str(build))
        if numbers is not None and build.arch == 90 and build.kernel in compile_matrix.FLOP:
            assert numbers["serialised"] == 0 or "bool" in build.features, build
            assert numbers.get("hgmma", 0) > 0 or build.features == ("blocks",), build


class Absent:
    """A driver of a GPU that is not there: its kernels are compiled, and nothing runs."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that calls on CPU tensors would launch on an H100, compiled for it."""
    from attnkit.kernels import host
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    names = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        names.append(self.fn.__name__)
        return run(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(host, "device_family", lambda _: "hopper")
    monkeypatch.setattr(driver, "_active", Absent(90))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    return names


@pytest.mark.parametrize("case", [
    testing.Case("sizes of 1, which are constants then", 1, 1, 1, 1, 1, 64, right=0),
    testing.Case("descriptors", 1, 2, 1, 200, 200, 64),
], ids=str)  # fmt: skip
def test_calls_compile_as_they_are_launched(launched, case):
    """With the constants, divisors and types that Triton itself sees in the arguments."""
    from attnkit.kernels.backward_launch import backward
    from attnkit.kernels.forward import forward

    x = testing.build(case, torch.bfloat16)
    out, lse = forward(*x[:5])
    needs = (True, True, True, False, False)
    backward(x.dout, x.dlse, *x[:3], out, lse, x.args, x.spec, needs)
    assert {"forward_kernel", "dkdv_kernel", "dq_kernel"} <= set(launched)


def test_decoding_compiles_as_it_is_launched(launched):
    from attnkit.kernels.decode import decode

    q = torch.empty(1, 4, 1, 64, dtype=torch.bfloat16)
    cache = torch.empty(9, 2, 16, 64, dtype=torch.float8_e4m3fn)
    scale = torch.empty(9, 2, 16)
    table = torch.zeros(1, 4, dtype=torch.int32)
    args = TensorArgs(lengths=torch.ones(1, dtype=torch.int32))
    spec = AttentionSpec(0.1, None, 0, True)
    where = CacheArgs(block_table=table, k_scale=scale, v_scale=scale)
    decode(q, cache, cache, args, spec, where)
    assert launched == ["decode_kernel", "merge_kernel"]
