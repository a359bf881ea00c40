"""The committed budgets of the CUDA kernels, and that a kernel above its own is a complaint."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent))
import cuda_budgets
from cuda_budgets import Compiled, Row

from attnkit.backends import cuda
from attnkit.spec import AttentionSpec, TensorArgs

PTXAS = """\
ptxas info    : Compiling entry function '_Zkernel' for 'sm_90a'
ptxas info    : Function properties for _Zkernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers
"""


def test_every_kernel_has_a_budget_for_every_target():
    budgets = cuda_budgets.read_budgets()
    for arch in ("80", "90a", "100"):
        kernels = {kernel for kernel, target in budgets if target == arch}
        for d, dv in cuda._HEAD_DIMS:
            assert sum(f" {d}, {dv}" in kernel for kernel in kernels) == 12, (arch, d, dv)
        assert {"append_kernel", "merge_kernel"} < kernels
    for row in budgets.values():
        assert cuda_budgets.complaints(row, budgets) == []


def test_the_backend_knows_how_much_shared_memory_its_kernels_take():
    rows = cuda_budgets.read_budgets().values()
    for (d, dv), most in cuda._HEAD_DIMS.items():
        assert most == max(row.shared for row in rows if f" {d}, {dv}" in row.kernel)


def test_a_gpu_with_little_shared_memory(monkeypatch):
    """sm_86, sm_89 and sm_120 have 99 KiB, as against 163 and 227."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = SimpleNamespace(major=8, minor=9, shared_memory_per_block_optin=99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(cuda, "_missing", lambda *_: None)
    spec = AttentionSpec(1.0)
    with FakeTensorMode():
        for dim, refused in ((128, False), (256, True)):
            q = torch.empty(1, 2, 1, dim, device="cuda:0", dtype=torch.float16)
            said = cuda.supports(q, q, q, TensorArgs(), spec)
            assert (said is not None) == refused
    assert said == (
        f"head dims 256 and 256 take up to {cuda._HEAD_DIMS[256, 256]} bytes of shared memory, "
        "cuda:0 has 101376"
    )


def test_littles_law():
    """1.2 times what an H200 moves in 700 ns, of one of its 132 multiprocessors."""
    assert cuda_budgets.needed("H200") == pytest.approx(1.2 * 4800e9 * 700e-9 / 132)
    assert cuda_budgets.needed("A100") < cuda_budgets.needed("H100") < cuda_budgets.needed("H200")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spilled": 4}, "spills 4 bytes"),
        ({"registers": 201}, "registers 201, its budget is 200"),
        ({"shared": 1025}, "shared 1025, its budget is 1024"),
        ({"blocks": 1}, "1 blocks, its budget is 2"),
        ({"in_flight": 30000}, "30000 bytes on their way, H200 asks for 30545"),
        ({"registers": 199, "blocks": 3}, ""),
    ],
)
def test_complaints(change, text):
    budget = Row("kernel", "90a", 200, 0, 1024, 2, 32768)
    found = cuda_budgets.complaints(budget._replace(**change), {budget[:2]: budget})
    assert found == ([text] if text else [])


def test_what_ptxas_says():
    first, last = ({"stack": 0, "stores": n, "loads": 4, "registers": 90 + n} for n in (8, 0))
    said = PTXAS.format(**first) + "noise\n" + PTXAS.format(**last)
    assert cuda_budgets.told(PTXAS.format(**first)) == {("_Zkernel", "90a"): Compiled(98, 12)}
    assert cuda_budgets.told(said) == {("_Zkernel", "90a"): Compiled(90, 4)}  # the later build
