"""Every test of the emulated CUDA kernels again, with AddressSanitizer and UBSan, and with TSan."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cuda_sanitizers
from cuda_kernels import say


@pytest.mark.parametrize("variant", ["asan", "tsan"])
def test_no_stray_access_and_no_race(request, variant):
    cuda_sanitizers.start()
    status, said = cuda_sanitizers.RUNS[variant].result(900)
    assert status == 0, said[-6000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) > 200
    for line in re.findall("CUDA emulator.*", said):
        say(request, f"{line}, {passed[0]}")
