"""The registered operators: schema, fakes and autograd registration, by torch's own opcheck."""

from __future__ import annotations

import pytest
import torch

from attnkit import testing
from attnkit.backends import cpu
from attnkit.testing import Case

pytestmark = pytest.mark.skipif(
    not cpu.BUILT, reason="attnkit was installed without its C++ extension"
)

CASES = [
    Case("plain"),
    Case("everything", 2, 4, 2, 70, 80, 16, 24, left=30, right=5, bottom_right=True,
         hide="lengths+keep+segments+blocks", bias="float:1hqk", alibi="batch", softcap=3.0,
         sinks=True, dropout_p=0.2, layout="transposed"),
    Case("bool", bias="bool:b11k", layout="sliced"),
    Case("packed", packed=((5, 9), (0, 3), (20, 20)), right=0, bottom_right=True),
    Case("no-queries", queries=0, bias="float:bhqk"),
    Case("no-keys", keys=0, sinks=True),
]  # fmt: skip
CALLS = pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((CASES[1], dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    ],
    ids=str,
)
OPS = torch.ops.attnkit


def test_these_are_all():
    """An operator that nobody checks here would be found here."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("attnkit::")}
    names -= {"attnkit::cuda_forward", "attnkit::cuda_decode", "attnkit::cuda_append"}  # elsewhere
    assert names == {
        "attnkit::cpu_forward",
        "attnkit::cpu_backward",
        "attnkit::cpu_decode",
        "attnkit::cpu_append",
        "attnkit::cpu_extend",
        "attnkit::cpu_probe_fma",
        "attnkit::cpu_probe_read",
        "attnkit::cpu_instruction_sets",
        "attnkit::triton_forward",
        "attnkit::triton_backward",
        "attnkit::triton_decode",
    }


@CALLS
def test_forward(case, dtype):
    x = testing.build(case, dtype)
    torch.library.opcheck(OPS.cpu_forward.default, (*x[:3], *x.args, *x.spec))


def check_backward(case, dtype, wanted):
    x = testing.build(case, dtype)
    out, lse = cpu.forward(*x[:5])
    bias = x.args.bias is not None and x.args.bias.is_floating_point()
    there = (True, True, True, bias, x.args.sinks is not None)
    needs = [n in wanted and there[n] for n in range(5)]
    arguments = (x.dout, x.dlse, *x[:3], out, lse, *x.args, *x.spec, *needs)
    torch.library.opcheck(OPS.cpu_backward.default, arguments)


@CALLS
def test_backward(case, dtype):
    check_backward(case, dtype, range(5))


@pytest.mark.parametrize("wanted", [(1, 4), (0, 3), ()], ids=str)
def test_backward_of_some(wanted):
    check_backward(CASES[1], torch.float32, wanted)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_decode(layout):
    case = Case("", 3, 4, 2, 2, 70, 16, right=0, bottom_right=True, hide="lengths", layout=layout)
    x = testing.build(case, torch.float32)
    torch.library.opcheck(OPS.cpu_decode.default, (*x[:3], *x.args, *x.spec))


def test_probes():
    assert OPS.cpu_probe_fma(10) > 0
    assert isinstance(OPS.cpu_probe_read(torch.ones(4096)), float)
    names = OPS.cpu_instruction_sets().split(",")
    assert names[0] in names[1:]
    assert "portable" in names


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_compiles(case):
    """One graph, the same bits as eager."""
    x = testing.build(case, torch.float32)

    def call(q, k, v):
        return OPS.cpu_forward.default(q, k, v, *x.args, *x.spec)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(*x[:3]), call(*x[:3]), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
