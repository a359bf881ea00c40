"""The suites by name, each in the module that knows how its work is done.

``forward``, ``backward``, ``step``, ``masks`` (attention), ``decode``, ``varlen``, ``modules`` and
``compile`` (modules), ``generation``, ``overhead`` (calls).
"""

from __future__ import annotations

from attnkit.benchmark.suites import attention, calls, decode, generation, modules, varlen
from attnkit.benchmark.tasks import Suite

SUITES: dict[str, Suite] = {
    **attention.SUITES,
    **decode.SUITES,
    **varlen.SUITES,
    **modules.SUITES,
    **generation.SUITES,
    **calls.SUITES,
}
