"""bench/machine_code_cpu.py sees a spill where there is one, and only there."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / "bench" / "machine_code_cpu.py"
NAME = "attnkit::avx2::Forward<attnkit::avx2::Plain<float> >::strip(attnkit::avx2::Head<float>)"


@pytest.fixture(scope="module")
def machine_code():
    spec = importlib.util.spec_from_file_location("machine_code_cpu", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def disassembly(*inside: str) -> list[str]:
    """A function with one loop: a broadcast, eight products, and what else is to be inside."""
    body = ["push   %rbp", "mov    %rsp,%rbp", "vbroadcastss (%rsi),%ymm9"]
    body += [f"vfmadd231ps 0x{32 * n:x}(%rdi),%ymm9,%ymm{n}" for n in range(8)]
    body += [*inside, "cmp    %rax,%rcx", "jne    102 <somewhere>", "ret"]
    lines = [f"  {0x100 + n:x}:\t{line}" for n, line in enumerate(body)]
    return [f"0000000000000100 <{NAME}>:", *lines]


def test_a_loop_is_counted(machine_code):
    (loop,) = machine_code.hot_loops(disassembly())
    assert loop.isa == "avx2"
    assert loop.where.startswith("Forward<Plain<float")
    assert (loop.instructions, loop.products, loop.sums, loop.loads) == (11, 8, 8, 9)
    assert loop.spills == 0


@pytest.mark.parametrize("register", ["%rsp", "%rbp"])
def test_a_spill_is_seen(machine_code, register):
    inside = [f"vmovaps %ymm7,-0x40({register})", f"vmovaps -0x40({register}),%ymm10"]
    (loop,) = machine_code.hot_loops(disassembly(*inside))
    assert loop.spills == 2


def test_a_product_that_is_read_from_the_stack_is_a_spill(machine_code):
    (loop,) = machine_code.hot_loops(disassembly("vfmadd213ps 0x20(%rsp),%ymm9,%ymm10"))
    assert loop.spills == 1


def test_a_constant_on_the_stack_is_none(machine_code):
    (loop,) = machine_code.hot_loops(disassembly("vpand  0x20(%rsp),%ymm10,%ymm11"))
    assert (loop.spills, loop.constants) == (0, 1)


def test_a_loop_without_sums_is_not_hot(machine_code):
    lines = [line for line in disassembly() if "231ps" not in line]
    assert machine_code.hot_loops(lines) == []


def test_a_kernel_that_is_not_found_is_missed(machine_code):
    assert machine_code.missing(machine_code.hot_loops(disassembly())) == [
        "Backward of avx2",
        "Decode of avx2",
    ]
