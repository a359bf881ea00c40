"""Measuring: the one engine behind the demo, ``bench/`` and every figure this project quotes.

    from attnkit.benchmark import PRESETS, markdown, run
    results = run(PRESETS["quick"], progress=print)
    print(markdown(results))
    results.save("results.json")

The parts, each usable alone: ``timing`` (candidates against each other in paired rounds of random
order), ``probes`` (the machine's peaks), ``memory`` (peak extra memory, in a child process),
``numeric`` (nothing is timed before its numbers were compared with float64), ``cases`` (shapes and
implementations), ``suite`` (all of it together), ``results`` (the file format and the table).
"""

from attnkit.benchmark.cases import (
    IMPLEMENTATIONS,
    OPERATIONS,
    Case,
    Inputs,
    Work,
    implementation,
    make_inputs,
    prepare,
)
from attnkit.benchmark.machine import (
    Machine,
    Versions,
    describe_machine,
    describe_versions,
    git_commit,
    headline,
)
from attnkit.benchmark.memory import MemoryMeter, MemoryUse, loglog_slope, peak_growth
from attnkit.benchmark.numeric import TOLERANCE, Truth, WrongResult, check, errors, truth
from attnkit.benchmark.probes import PROBE, Peak, Probe, flops_probe, read_probe
from attnkit.benchmark.results import Results, Row, markdown
from attnkit.benchmark.suite import (
    PRESETS,
    Preset,
    Settings,
    Subject,
    check_all,
    feasible,
    measure,
    run,
)
from attnkit.benchmark.timing import (
    CLOCKS,
    Candidate,
    Comparison,
    Ratio,
    Samples,
    compare,
    paired_ratio,
)

__all__ = [
    "CLOCKS",
    "IMPLEMENTATIONS",
    "OPERATIONS",
    "PRESETS",
    "PROBE",
    "TOLERANCE",
    "Candidate",
    "Case",
    "Comparison",
    "Inputs",
    "Machine",
    "MemoryMeter",
    "MemoryUse",
    "Peak",
    "Preset",
    "Probe",
    "Ratio",
    "Results",
    "Row",
    "Samples",
    "Settings",
    "Subject",
    "Truth",
    "Versions",
    "Work",
    "WrongResult",
    "check",
    "check_all",
    "compare",
    "describe_machine",
    "describe_versions",
    "errors",
    "feasible",
    "flops_probe",
    "git_commit",
    "headline",
    "implementation",
    "loglog_slope",
    "make_inputs",
    "markdown",
    "measure",
    "paired_ratio",
    "peak_growth",
    "prepare",
    "read_probe",
    "run",
    "truth",
]
