"""What is installed, and how: the extension, the pure install, metadata, the pages' code."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnkit

ROOT = Path(__file__).resolve().parents[1]
IN_CHECKOUT = (ROOT / "setup.py").exists()
checkout = pytest.mark.skipif(not IN_CHECKOUT, reason="needs the checkout, and this is an install")
try:
    DISTRIBUTION = importlib.metadata.distribution("attnkit")
except importlib.metadata.PackageNotFoundError:
    DISTRIBUTION = None
installed = pytest.mark.skipif(DISTRIBUTION is None, reason="attnkit is on the path, not installed")
HEAVY = (
    *("matplotlib", "tokenizers", "babel", "rich", "pytest", "torch.utils.cpp_extension"),
    *("sympy", "transformers"),
)


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def pure(tmp_path_factory) -> Path:
    """The folder of a build without the extension; the checkout is left as it was."""
    base = tmp_path_factory.mktemp("pure")
    before = sorted((ROOT / "attnkit").iterdir())
    arguments = ("setup.py", "-q", "build", "--build-base", str(base), "--build-lib")
    done = python(*arguments, str(base / "lib"), cwd=ROOT, ATTNKIT_BUILD_EXT="0")
    assert done.returncode == 0, done.stderr
    assert sorted((ROOT / "attnkit").iterdir()) == before
    return base / "lib"


# --- what is installed ---------------------------------------------------------------------------


@installed
def test_the_version_is_that_of_the_metadata():
    assert DISTRIBUTION.version == attnkit.__version__


@installed
def test_the_metadata_asks_for_what_is_needed_and_no_more():
    needs = [r for r in DISTRIBUTION.requires if "extra ==" not in r]
    assert {re.split(r"[<>=[]", need)[0] for need in needs} == {"torch", "safetensors"}
    extras = set(DISTRIBUTION.metadata.get_all("Provides-Extra"))
    named = {"demo", "hf", "bench", "peers", "train", "docs", "test", "dev"}
    assert named <= extras


@installed
def test_the_command_is_installed():
    scripts = DISTRIBUTION.entry_points.select(group="console_scripts")
    assert [(script.name, script.value) for script in scripts] == [("attnkit", "attnkit.cli:main")]


def test_the_package_says_that_it_is_typed():
    assert Path(attnkit.__file__).with_name("py.typed").exists()


@installed
def test_kernels_is_a_part_of_attnkit_and_nothing_by_itself(tmp_path):
    done = python("-c", "import attnkit.kernels as k; print(k.__name__)", cwd=tmp_path)
    assert done.stdout.strip() == "attnkit.kernels", done.stderr
    for code in ("from kernels import forward", "import kernels; kernels.forward"):
        done = python("-c", code, cwd=ROOT)
        assert done.returncode != 0
        expected = ("import attnkit.kernels, not kernels", "No module named")
        assert any(message in done.stderr for message in expected), done.stderr
    assert python("-c", "import kernels.forward", cwd=ROOT).returncode != 0


def test_a_checkout_does_not_pass_for_the_kernels_package(tmp_path):
    code = "from transformers.utils import is_kernels_available as f; print(f())"
    done = python("-c", "import transformers", cwd=tmp_path)
    if done.returncode:
        pytest.skip("needs transformers")
    done = python("-c", code, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


@installed
def test_importing_loads_nothing_heavy(tmp_path):
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import attnkit\n"
        f"print([m for m in {HEAVY} if m in set(sys.modules) - before])\n"
    )
    done = python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_extension_is_built_for_every_python_and_links_to_no_python():
    spec = importlib.util.find_spec("attnkit._C")
    if spec is None:
        pytest.skip("attnkit was installed without its C++ extension")
    library = Path(spec.origin)
    assert library.name == "_C.abi3.so"
    content = library.read_bytes()
    assert b"libtorch_cpu" in content  # it is linked to torch ...
    assert b"libtorch_python" not in content  # ... but not to the part that is for one Python
    assert b"libpython" not in content


# --- installs without the extension --------------------------------------------------------------


@checkout
def test_a_pure_build_has_everything_but_the_extension(pure):
    built = {path.relative_to(pure).as_posix() for path in pure.rglob("*") if path.is_file()}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attnkit").rglob("*")
        if path.suffix in {".py", ".j2", ".typed"}
    }
    assert wanted | {"attnkit/_build_info.py", "attnkit/kernels/__init__.py"} <= built
    assert not [name for name in built if name.endswith(".so")]
    assert not [name for name in built if name.startswith("kernels")]


# An editable install finds the checkout's extension for any copy of the package, this one too.
WITHOUT_EDITABLE = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in f'{f}']\n"
)


@checkout
def test_a_pure_install_works_and_says_why_a_backend_is_missing(pure):
    code = WITHOUT_EDITABLE + (
        "import torch, attnkit\n"
        "from attnkit.cli import main\n"
        "q = torch.randn(1, 2, 5, 8)\n"
        "assert attnkit.available_backends() == ['reference'], attnkit.available_backends()\n"
        "assert attnkit.attention(q, q, q).isfinite().all()\n"
        "print(attnkit.explain(q, q, q)['cpu'])\n"
        "main(['info'])\n"
    )
    done = python("-c", code, cwd=pure)
    assert done.returncode == 0, done.stderr
    assert "without its C++ extension" in done.stdout
    assert "ATTNKIT_BUILD_EXT=0 was set when attnkit was installed" in done.stdout


@checkout
@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"ATTNKIT_BUILD_EXT": "0"}, "ATTNKIT_BUILD_EXT=0 was set when attnkit was installed"),
        (
            {"CXX": "no-such-compiler -x"},
            "CXX names 'no-such-compiler -x', which is not on the PATH",
        ),
        ({"PATH": "", "CXX": ""}, "no C++ compiler was found"),
    ],
    ids=["asked", "wrong CXX", "none"],
)
def test_setup_says_why_it_builds_without_the_extension(tmp_path, environment, sentence):
    arguments = ("--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp"))
    done = python("setup.py", "-q", "build_ext", *arguments, cwd=ROOT, **environment)
    assert done.returncode == 0, done.stderr
    assert f"attnkit: installing without the C++ extension: {sentence}" in done.stderr


@checkout
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler that works")
def test_a_compiler_that_fails_is_an_error_that_says_what_to_do(tmp_path):
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *" -c "*) echo "internal error: boom" >&2; exit 1 ;; esac\n'
        'exec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    arguments = ("--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp"))
    done = python("setup.py", "-q", "build_ext", *arguments, cwd=ROOT, CXX=str(compiler))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "internal error: boom" in said
    assert f"compiling attnkit._C with '{compiler}' failed" in said
    assert "ATTNKIT_BUILD_EXT=0 installs without the extension" in said
    assert not list(tmp_path.rglob("*.so"))


# --- the documentation ---------------------------------------------------------------------------


@checkout
@pytest.mark.parametrize("page", ["README.md", "docs/troubleshooting.md", "docs/backends.md"])
def test_the_code_of_a_page_runs(page, monkeypatch):
    blocks = code_blocks(page)
    assert blocks
    # the graph is what counts here; to compile it as well takes half a minute
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    names: dict[str, object] = {}
    for block in blocks:
        if not ("transformers" in block and importlib.util.find_spec("transformers") is None):
            exec(compile(block, page, "exec"), names)


@checkout
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_each_drop_in_of_the_readme_is_short_and_runs_on_attnkit(ran):
    section = (ROOT / "README.md").read_text().split("## Drop-ins")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    names = {"torch": torch, **dict.fromkeys("qkv", torch.randn(1, 2, 8, 16))}
    assert len(blocks) == 5
    for block in blocks:
        assert len(ast.parse(block).body) <= 6
        if "torch.compile" in block:  # a graph calls operators, which are not recorded
            continue
        if "transformers" in block and importlib.util.find_spec("transformers") is None:
            continue
        del ran[:]
        exec(compile(block, "README.md", "exec"), names)
        assert ran


READ = re.compile(r'(?:environ(?:\.get\(|\[)|getenv\()"(ATTNKIT_\w+)"')


@checkout
def test_the_readme_lists_every_environment_variable_and_there_are_few():
    sources = [ROOT / "setup.py"]
    for folder in ("attnkit", "kernels", "csrc"):
        suffixes = {".py", ".cpp", ".h", ".inl", ".cu", ".cuh"}
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    read = {name for path in sources for name in READ.findall(path.read_text())}
    listed = set(re.findall(r"^\| `(ATTNKIT_\w+)`", (ROOT / "README.md").read_text(), re.M))
    assert {"ATTNKIT_BUILD_EXT", "ATTNKIT_CPU_ISA"} <= read
    assert read == listed
    assert len(read) < 5


@checkout
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/troubleshooting.md"])
def test_the_verbs_that_a_page_names_exist(page):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"(?:^|`)make ([a-z-]+(?: [a-z-]+)*)", (ROOT / page).read_text(), re.M)
    assert named
    assert {verb for line in named for verb in line.split()} <= set(phony.group(1).split())


@checkout
def test_links_between_the_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
