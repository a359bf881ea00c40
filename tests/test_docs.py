"""The documentation: its code runs, what it shows is what is there, its links lead somewhere."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]
checkout = pytest.mark.skipif(not DOCS, reason="needs the checkout, and this is an install")


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def load(name: str):
    """A script of docs/, by itself."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- code ----------------------------------------------------------------------------------------


@checkout
@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page)])
def test_the_code_of_a_page_runs(page, monkeypatch):
    # the graph is what counts here; to compile it as well takes half a minute
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    names: dict[str, object] = {}
    for block in code_blocks(page):
        if not ("transformers" in block and importlib.util.find_spec("transformers") is None):
            exec(compile(block, page, "exec"), names)


@checkout
def test_every_block_of_python_is_found():
    """Whatever its fence looks like: what is called Python runs."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert len(re.findall(r"^ *[`~]{3,} *py", text, re.M)) == len(code_blocks(page)), page
    assert sum(bool(code_blocks(page)) for page in DOCS) >= 10


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
def test_what_pages_show_of_the_sources_is_there():
    hooks = load("hooks")
    shown = []
    for page in DOCS:
        text = (ROOT / page).read_text()
        count = len(re.findall(r'"code: ', text))
        found = hooks.with_code(text, (ROOT / page).parent)
        titles = re.findall(r'^```(?:cpp|python) title="(.+)"$', found, re.M)
        assert len(titles) == count, page
        shown += titles
    for part in ("csrc/cpu/forward.inl", "csrc/cpu/backward.inl", "csrc/cpu/gemm.inl",
                 "csrc/cpu/decode.inl", "csrc/cuda/decode.cuh", "kernels/forward.py",
                 "kernels/parts.py", "kernels/decode.py"):  # fmt: skip
        assert part in shown


@checkout
def test_code_that_is_gone_is_missed(tmp_path):
    hooks = load("hooks")
    source = tmp_path / "a.inl"
    source.write_text(
        "  int a() {\n#pragma x\n    return 1;\n  }\n  int b() {\n    return 2;\n  }\n"
    )
    assert hooks.snippet(source, "int a() ... }") == "int a() {\n#pragma x\n  return 1;\n}"
    assert hooks.snippet(source, "return 2;") == "return 2;"
    for spec, said in (
        ("int c() ... }", "stands on 0 lines"),
        ("return", "stands on 2 lines"),
        ("return 2; ... a()", "does not follow"),
    ):
        with pytest.raises(LookupError, match=re.escape(said)):
            hooks.snippet(source, spec)
    line = '[csrc/cpu/gone.inl](../csrc/cpu/gone.inl "code: x")'
    with pytest.raises(LookupError, match="there is no such file"):
        hooks.with_code(line, ROOT / "docs")
    line = '[csrc/cpu/pack.inl](../csrc/cpu/forward.inl "code: x")'
    with pytest.raises(LookupError, match="the link leads to"):
        hooks.with_code(line, ROOT / "docs")


# --- pages ---------------------------------------------------------------------------------------


@checkout
def test_the_figures_are_drawn_from_what_is_so():
    figures = load("figures")
    assert {path.stem for path in figures.FOLDER.glob("*")} == set(figures.FIGURES)
    for name, draw in figures.FIGURES.items():
        kept = (figures.FOLDER / f"{name}.svg").read_text()
        assert draw() == kept, f"python docs/figures.py draws another {name}"
    text = "".join((ROOT / page).read_text() for page in DOCS)
    assert all(f"figures/{name}.svg" in text for name in figures.FIGURES)


@checkout
def test_every_page_has_a_place_in_the_site():
    hooks = load("hooks")
    placed = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    own = {page.removeprefix("docs/") for page in DOCS}
    assert set(placed) == own | set(hooks.ELSEWHERE) | {"performance.md"}
    assert len(placed) == len(set(placed))


@checkout
def test_the_performance_page_has_every_measurement():
    page = load("hooks").performance()
    for file in (ROOT / "bench/results").glob("2*.md"):
        assert file.read_text().splitlines()[0].removeprefix("# ") in page


@checkout
def test_results_of_the_benchmark_become_a_table(tmp_path):
    from attnkit.benchmark import Results

    hooks, results = load("hooks"), Results.here((), {})
    (tmp_path / "a.json").write_text(results.to_json())
    (tmp_path / "b.json").write_text('{"something": "else"}')
    text = hooks.measured(tmp_path / "a.json")
    assert text.startswith(f"## {results.machine.cpu}, 20")
    assert "| case | operation | implementation |" in text
    assert hooks.measured(tmp_path / "b.json") == ""


@checkout
def test_links_to_what_the_site_has_not_become_text():
    hooks = load("hooks")
    text = "[a](CONTRIBUTING.md) [b](docs/masks.md#traps) [LICENSE](LICENSE)\n```\n[c](d.md)\n```\n"
    assert hooks.with_links(text, ROOT / "README.md", Path("index.md")) == (
        "[a](contributing.md) [b](masks.md#traps) `LICENSE`\n```\n[c](d.md)\n```\n"
    )
    page = ROOT / "docs/tutorial/x.md"
    assert (
        hooks.with_links("[a](../../README.md)", page, Path("tutorial/x.md")) == "[a](../index.md)"
    )


@checkout
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/troubleshooting.md"])
def test_the_verbs_that_a_page_names_exist(page):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"(?:^|`)make ([a-z-]+(?: [a-z-]+)*)", (ROOT / page).read_text(), re.M)
    assert named
    assert {verb for line in named for verb in line.split()} <= set(phony.group(1).split())


@checkout
def test_links_between_the_pages_lead_somewhere():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(((?!https?:)[^)# ]+)[^)]*\)", text):
            assert ((ROOT / page).parent / target).exists(), (page, target)


@checkout
def test_the_reference_has_every_public_name():
    import attnkit
    from attnkit import masks, models, nn

    text = "".join((ROOT / page).read_text() for page in DOCS if page.startswith("docs/reference"))
    names = set(re.findall(r"\w+", text))
    for part in (attnkit, masks, models, nn):
        assert set(part.__all__) <= names, part.__name__


@checkout
def test_docstrings_become_markdown():
    pytest.importorskip("griffe", reason="needs attnkit[docs]")
    text = """Of :class:`Cache`, as in::

    ====== ============ =========
    name   shape        meaning
    ====== ============ =========
    a,     [B, D|Dv]    the first
    b
    c      [B,          the last
           H]           of all
    ====== ============ =========
    """
    markdown = " ".join(load("docstrings").as_markdown(text).split())
    assert markdown == (
        "Of `Cache`, as in: | name | shape | meaning | | --- | --- | --- | "
        "| a, b | [B, D\\|Dv] | the first | | c | [B, H] | the last of all |"
    )


@checkout
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs attnkit[docs]")
def test_the_site_is_built_without_a_warning(tmp_path):
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    forward = (tmp_path / "tutorial/forward.html").read_text()
    assert "<math" in forward
    assert "arithmatex" not in forward
    assert "code: " not in forward
