"""Imports point down only: models -> nn -> functional -> dispatch -> backends, kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# the parts of the package from the lowest to the highest; those of one row may use each other
LAYERS = [
    {"kernels", "spec", "masks", "_flops", "_gpu", "_layout", "_slots"},
    {"backends"},
    {"dispatch"},
    {"_checks", "_cache_checks", "_shapes", "_options", "_autograd", "functional", "_sharded"},
    {"__init__"},  # the public names
    {"cache", "_paged"},
    {"nn", "flash_attn", "integrations"},
    {"recording"},
    {"models"},
    {"testing", "benchmark", "viz", "recipes", "determinism", "verify"},
    {"cli", "__main__"},
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
BUILT = {"_C", "_C_cuda", "_build_info"}  # made by the build, import nothing
# a part of its row, yet not to be used by its neighbours
APART = {"backends"}


def part_of(module: str) -> str:
    """The part of the package that a dotted name belongs to: attnkit.nn.x is in nn."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imports_of(source: str, module: str, is_package: bool) -> list[str]:
    """Every attnkit module that `source` imports, also inside functions, as dotted names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")
                up = up[: len(up) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            found += [f"{base}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] == "attnkit"]


def complaints(module: str, imported: list[str]) -> list[str]:
    """What is wrong with the imports of one module, a sentence each."""
    own = part_of(module)
    if own not in RANK:
        return [f"{module} has no place in LAYERS"]
    wrong = []
    for name in imported:
        part = part_of(name)
        if part in BUILT or name == "attnkit.__version__":
            continue
        if part not in RANK:
            # a public name of attnkit itself
            part = "__init__"
        if RANK[part] > RANK[own]:
            wrong.append(f"{module} imports {name}, which lies above it")
        if part == own and own in APART:
            other = ".".join(name.split(".")[:3])
            if other != module and module != f"attnkit.{own}":
                wrong.append(f"{module} imports {name}, which stands beside it")
    return wrong


def modules() -> list[tuple[Path, str]]:
    files = [(p, p.relative_to(ROOT)) for p in sorted(ROOT.glob("attnkit/**/*.py"))]
    files += [
        (p, Path("attnkit") / p.relative_to(ROOT)) for p in sorted(ROOT.glob("kernels/**/*.py"))
    ]
    named = []
    for path, shown in files:
        parts = shown.with_suffix("").parts
        named.append((path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return [(path, name) for path, name in named if part_of(name) not in BUILT]


@pytest.mark.parametrize(("path", "module"), modules(), ids=lambda x: x if type(x) is str else "")
def test_imports_point_down(path, module):
    imported = imports_of(path.read_text(), module, path.name == "__init__.py")
    assert complaints(module, imported) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attnkit.masks", "from attnkit.functional import attention"),
        ("attnkit.backends.cpu", "from attnkit.backends import reference"),
        ("attnkit.backends.cpu", "from . import reference"),
        ("attnkit.backends.reference", "def f():\n    import attnkit.dispatch"),
        ("attnkit.dispatch", "import attnkit"),
        ("attnkit.cache", "from attnkit.nn import MultiheadAttention"),
        ("attnkit.nn.x", "from attnkit.models.y import z"),
        ("attnkit.functional", "from .nn import MultiheadAttention"),
        ("attnkit.stray", ""),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert len(complaints(module, imports_of(source, module, False))) == 1


def test_importing_does_no_work():
    """No thread, no random draw, no warning, no global switch of torch's, nothing printed."""
    import subprocess
    import sys

    code = (
        "import torch, threading, warnings\n"
        "warnings.simplefilter('error')\n"
        "def threads(): return threading.active_count(), torch.get_num_threads()\n"
        "state, before = torch.get_rng_state(), threads()\n"
        "sdpa = torch.nn.functional.scaled_dot_product_attention\n"
        "import attnkit\n"
        "assert torch.equal(state, torch.get_rng_state())\n"
        "assert threads() == before\n"
        "assert sdpa is torch.nn.functional.scaled_dot_product_attention\n"
        "assert not torch.cuda.is_initialized()\n"
        "import sys\n"
        "assert not {'sympy', 'torch._dynamo', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
