"""What compiling shows of the Triton kernels: every target, within the budgets of each."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from attnkit.backends import triton

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
    assert compile_matrix.excess(compile_matrix.attempt(build), BUDGETS[QUICK]) == []


def test_the_budgets_are_those_of_the_matrix(compile_matrix):
    """`python bench/compile_matrix.py --check` compiles all of them; CI does that."""
    builds = [*compile_matrix.MAIN, *compile_matrix.matrix()]
    assert {str(b) for b in builds} == set(BUDGETS)


def test_goals_of_the_main_kernels():
    """Two blocks per multiprocessor and no spill in the hot loop, where that was promised."""
    for dim, resident in ((64, 893), (128, 949)):
        numbers = BUDGETS[f"forward sm_90 d{dim} bf16 right"]
        assert numbers["resident"] >= resident
        assert numbers["blocks"] >= 2
        assert numbers["hot spills"] == 0
    for dim in (64, 128):
        assert BUDGETS[f"dkdv sm_90 d{dim} bf16 right"]["resident"] >= 949
    full = BUDGETS["forward sm_90 d128 bf16"]["resident"]
    for masks in ("lengths", "keep", "right left"):
        assert BUDGETS[f"forward sm_90 d128 bf16 {masks}"]["resident"] > 0.9 * full
    assert BUDGETS["forward sm_90 d128 bf16 bias"]["serial"] >= 499


def test_nothing_failed_to_compile():
    assert [name for name, numbers in BUDGETS.items() if "failed" in numbers] == []
