"""Measuring: the one engine behind the demo, ``attnkit bench``, ``bench/`` and every figure quoted.

    from attnkit.benchmark import PRESETS, markdown, run
    results = run(PRESETS["quick"], progress=print)
    print(markdown(results))
    results.save("results.json")

What is measured: ``cases`` (sizes, masks), ``implementations`` and ``peers`` (who), ``suites`` (how
each kind of work is done and checked), ``presets``.  How: ``timing`` (candidates against each other
in paired rounds of random order), ``gpu`` (events), ``probes`` (the machine's peaks), ``memory``
(in a child process), ``numeric`` (nothing is timed before its numbers were compared with float64),
``measuring`` (all of it together).  What comes out: ``results`` (the file format and the table).
"""

from attnkit.benchmark.cases import DTYPES, OPERATIONS, Case, Inputs, make_inputs
from attnkit.benchmark.implementations import IMPLEMENTATIONS, implementation
from attnkit.benchmark.machine import (
    Machine,
    Versions,
    describe_machine,
    describe_versions,
    git_commit,
    headline,
)
from attnkit.benchmark.measuring import USUAL, Preset, Settings, Workshop, chosen, run
from attnkit.benchmark.memory import MemoryMeter, MemoryUse, loglog_slope, peak_growth
from attnkit.benchmark.numeric import TOLERANCE, Truth, WrongResult, check, errors, truth
from attnkit.benchmark.presets import PRESETS
from attnkit.benchmark.probes import PROBE, Peak, Probe, flops_probe, read_probe
from attnkit.benchmark.results import Results, Row, markdown
from attnkit.benchmark.suites import SUITES
from attnkit.benchmark.suites.attention import Subject, prepare
from attnkit.benchmark.tasks import Contest, Suite, Task, Work
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
    "DTYPES",
    "IMPLEMENTATIONS",
    "OPERATIONS",
    "PRESETS",
    "PROBE",
    "SUITES",
    "TOLERANCE",
    "USUAL",
    "Candidate",
    "Case",
    "Comparison",
    "Contest",
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
    "Suite",
    "Task",
    "Truth",
    "Versions",
    "Work",
    "Workshop",
    "WrongResult",
    "check",
    "chosen",
    "compare",
    "describe_machine",
    "describe_versions",
    "errors",
    "flops_probe",
    "git_commit",
    "headline",
    "implementation",
    "loglog_slope",
    "make_inputs",
    "markdown",
    "paired_ratio",
    "peak_growth",
    "prepare",
    "read_probe",
    "run",
    "truth",
]
