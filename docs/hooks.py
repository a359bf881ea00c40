"""What `make docs` does to the pages: code from the sources, formulae, pages that live elsewhere.

A line that is nothing but a link to a source file, with a title that begins with "code:",

    [csrc/cpu/forward.inl](../../csrc/cpu/forward.inl "code: void raise( ... shrink); }")

becomes the lines of that file from the one that holds the first text (which must be one alone) to
the first that ends what stands after " ... ".  A text that is no longer there fails the build, and
tests/test_docs.py, which does the same without MkDocs.  In a plain view of the page it is a link.
"""

from __future__ import annotations

import html
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {
    ".py": "python",
    ".inl": "cpp",
    ".cpp": "cpp",
    ".h": "cpp",
    ".cu": "cpp",
    ".cuh": "cpp",
}
CODE = re.compile(r'^\[(?P<name>[^\]]+)\]\((?P<path>[^ )]+) "code: (?P<spec>[^"]+)"\)$', re.M)
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>(?!https?:)[^)# ]+)(?P<place>#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
# pages of the site that are files elsewhere in the repository
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
RESULTS = ROOT / "bench/results"


def snippet(path: Path, spec: str) -> str:
    """The lines of a file from the one with the first text to the one with the second.

    Raises:
        LookupError: the first text does not stand on one line alone, or the second not after it.
    """
    first, _, last = spec.partition(" ... ")
    lines = path.read_text().splitlines()
    starts = [n for n, line in enumerate(lines) if first in line]
    if len(starts) != 1:
        raise LookupError(f"{path}: {first!r} stands on {len(starts)} lines, expected 1")
    stop = starts[0]
    if last:
        ends = [n for n in range(stop, len(lines)) if last in lines[n]]
        if not ends:
            raise LookupError(f"{path}: {last!r} does not follow {first!r}")
        stop = ends[0]
    return textwrap.dedent("\n".join(lines[starts[0] : stop + 1]))


def with_code(text: str, folder: Path) -> str:
    """The text of a page in `folder`, with code in the place of links to it."""

    def code(match: re.Match[str]) -> str:
        path = (folder / match["path"]).resolve()
        if not path.is_file():
            raise LookupError(f"{match['path']}: there is no such file")
        shown = path.relative_to(ROOT).as_posix()
        if match["name"].strip("`") != shown:
            raise LookupError(f"{match['name']}: the link leads to {shown}")
        language = LANGUAGES[path.suffix]
        return f'```{language} title="{shown}"\n{snippet(path, match["spec"])}\n```'

    return CODE.sub(code, text)


def with_links(text: str, file: Path, page: Path) -> str:
    """Links of `file` as links of the site's page `page`; those to what it has not are text."""
    site = {(ROOT / source).resolve(): Path(target) for target, source in ELSEWHERE.items()}

    def link(match: re.Match[str]) -> str:
        target = (file.parent / match["path"]).resolve()
        place = match["place"] or ""
        if target in site:
            to = site[target]
        elif target.is_relative_to(RESULTS):
            to, place = Path("performance.md"), ""
        elif target.is_relative_to(ROOT / "docs"):
            to = target.relative_to(ROOT / "docs")
        else:
            text = match["text"]
            return text if text.startswith("`") or " " in text else f"`{text}`"
        up = [".."] * len(page.parent.parts)
        return f"[{match['text']}]({Path(*up, to).as_posix()}{place})"

    # code is left alone
    parts, at = [], 0
    for fence in FENCED.finditer(text):
        parts += [LINK.sub(link, text[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*parts, LINK.sub(link, text[at:])])


def performance() -> str:
    """All measurements of bench/results, the newest first."""
    pages = sorted(RESULTS.glob("2*.md"), reverse=True)
    intro = [
        "# Performance",
        "",
        "What follows is `bench/results`, as it was measured: each part names its machine, its day and",
        "its commit. Implementations of a row ran in interleaved rounds, and each result was checked",
        "against float64 before it was timed. Figures from another machine say little about yours:",
        "`make bench` measures there. No figure here is from a GPU.",
    ]
    texts = [re.sub(r"^#", "##", page.read_text(), flags=re.M) for page in pages]
    return "\n".join(intro) + "\n\n" + "\n\n".join(texts)


# ---------------------------------------------------------------- what MkDocs calls


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for name, source in ELSEWHERE.items():
        text = with_links((ROOT / source).read_text(), ROOT / source, Path(name))
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "performance.md", content=performance()))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Code and links of one page."""
    name = Path(page.file.src_uri)
    file = ROOT / "docs" / name
    if name.as_posix() in ELSEWHERE or not file.exists():
        return text
    return with_links(with_code(text, file.parent), file, name)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Formulae as MathML, which browsers draw by themselves."""
    from latex2mathml.converter import convert

    def formula(match: re.Match[str]) -> str:
        latex = html.unescape(match["latex"])
        display = "block" if match["tag"] == "div" else "inline"
        drawn = convert(latex, display=display)
        return f'<{match["tag"]} class="formula">{drawn}</{match["tag"]}>'

    return re.sub(
        r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>',
        formula,
        content,
        flags=re.S,
    )
