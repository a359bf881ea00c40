"""Genuine parallel text out of the message catalogues that Python packages carry.

    pip download --no-deps -d wheels Django wagtail sphinx weblate pretix horizon plone.app.locales
    python bench/catalogues.py wheels en.txt de.txt --language de
    python bench/quality.py translate --source en.txt --target de.txt

One line of each file is one message and its translation: no placeholder, markup or line break in
either, two to thirty words, each pair once.
"""

from __future__ import annotations

import argparse
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from babel.messages.pofile import read_po

PLACEHOLDER = re.compile(r"[%{}<>&\\$|\n\r\t]|::|``|__|https?:")
# dates, since some are blank forms, and what was dropped from a catalogue
UNREAD = re.compile(rb'^("(POT-Creation|PO-Revision)-Date:|#~).*$', re.MULTILINE)
WORDS = range(2, 31)


def pairs(wheel: Path, language: str) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".po") and language in re.split(r"[/.-]", name):
                yield from messages(archive.read(name))


def messages(catalogue: bytes) -> Iterator[tuple[str, str]]:
    for message in read_po(io.BytesIO(UNREAD.sub(b"", catalogue)), ignore_obsolete=True):
        source, target = message.id, message.string
        if message.fuzzy or not isinstance(source, str) or not isinstance(target, str):
            continue  # uncertain, or with plural forms
        if " " not in source:  # a key: some packages keep their text in a comment
            source = next((c[9:-1] for c in message.auto_comments if c.startswith("Default: ")), "")
        source, target = source.strip(), target.strip()
        if all(good(text) for text in (source, target)) and source != target:
            yield source, target


def good(text: str) -> bool:
    return len(text.split()) in WORDS and not PLACEHOLDER.search(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, help="a folder of wheels")
    parser.add_argument("source", type=Path, help="the English lines, written")
    parser.add_argument("target", type=Path, help="the translations, written")
    parser.add_argument("--language", default="de")
    options = parser.parse_args()
    found: dict[tuple[str, str], None] = {}
    for wheel in sorted(options.wheels.glob("*.whl")):
        before = len(found)
        found.update(dict.fromkeys(pairs(wheel, options.language)))
        print(f"{wheel.name}: {len(found) - before} pairs")
    if not found:
        parser.error(f"no catalogue of language {options.language!r} in {options.wheels}")
    options.source.write_text("".join(f"{source}\n" for source, _ in found), encoding="utf-8")
    options.target.write_text("".join(f"{target}\n" for _, target in found), encoding="utf-8")
    print(f"{len(found)} pairs")


if __name__ == "__main__":
    main()
