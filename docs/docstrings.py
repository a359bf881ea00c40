"""Docstrings, which are written to be read as they stand, as Markdown: for Griffe, in `make docs`.

Tables of reStructuredText become tables of Markdown, its roles code, and "::" at the end of a line
becomes ":".
"""

from __future__ import annotations

import re
from typing import Any

import griffe  # with mkdocstrings

RULE = re.compile(r"^ *=+(?: +=+)+ *$")
ROLE = re.compile(r":(?:class|meth|func|mod|attr):`~?([^`]+)`")


def as_markdown(text: str) -> str:
    """A docstring's text, its tables and marks as Markdown has them."""
    lines, out, n = text.splitlines(), [], 0
    while n < len(lines):
        if not RULE.match(lines[n]):
            out.append(re.sub(r"::$", ":", ROLE.sub(r"`\1`", lines[n])))
            n += 1
            continue
        starts = [match.start() for match in re.finditer("=+", lines[n])]
        rules = [m for m in range(n, len(lines)) if RULE.match(lines[m])][:3]
        if len(rules) == 2:  # a table without a head
            rules = [n, n, rules[1]]
        head = _rows(lines[rules[0] + 1 : rules[1]], starts) or [[""] * len(starts)]
        body = _rows(lines[rules[1] + 1 : rules[2]], starts)
        rows = [head[0], ["---"] * len(starts), *body]
        out += ["", *("| " + " | ".join(row) + " |" for row in rows), ""]
        n = rules[2] + 1
    return "\n".join(out)


def _rows(lines: list[str], starts: list[int]) -> list[list[str]]:
    """The cells of a table's lines; a line that begins further in goes on with the row before."""
    ends = [*starts[1:], None]
    rows: list[list[str]] = []
    for line in lines:
        cells = [line[a:b].strip().replace("|", "\\|") for a, b in zip(starts, ends, strict=True)]
        if rows and not cells[-1] and cells[0]:  # a name alone: two things share a row
            rows[-1][0] = f"{rows[-1][0].rstrip(',')}, {cells[0]}"
        elif rows and not cells[0]:
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    return rows


class Docstrings(griffe.Extension):
    """Griffe calls this for every object that it has read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
