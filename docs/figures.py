"""Draws the figures of the documentation:  python docs/figures.py

Each is SVG, written by hand but for its coordinates; what a mask shows is asked of attnkit.masks.
tests/test_docs.py wants the files in docs/figures to be what this writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "figures"
INK, PAPER, GREY, PALE = "#1f2937", "#ffffff", "#6b7280", "#eef0f4"
BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"  # told apart by colour-blind readers, too
FONT = "font-family='system-ui, sans-serif'"


class Drawing:
    """A canvas of a size; shapes are added in order."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height = width, height
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
            f"role='img' width='{width:g}'>",
            f"<title>{title}</title>",
            f"<rect width='{width:g}' height='{height:g}' fill='{PAPER}'/>",
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
            f"markerHeight='7' orient='auto'><path d='M0 0 8 4 0 8z' fill='{INK}'/></marker></defs>",
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str, line: str = "none") -> None:
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' rx='2' fill='{fill}' "
            f"stroke='{line}'/>"
        )

    def text(
        self, x: float, y: float, words: str, size: float = 13, fill: str = INK, at: str = "middle"
    ) -> None:
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size:g}' fill='{fill}' "
            f"text-anchor='{at}'>{words}</text>"
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.parts.append(
            f"<path d='M{x0:g} {y0:g}L{x1:g} {y1:g}' stroke='{INK}' stroke-width='1.4' "
            "fill='none' marker-end='url(#tip)'/>"
        )

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        for n, (colour, words) in enumerate(entries):
            self.box(x, y + 24 * n, 14, 14, colour, GREY)
            self.text(x + 22, y + 24 * n + 11.5, words, 13, at="start")

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def tiles() -> str:
    """Causal attention in tiles, one row block highlighted."""
    d, cell, n, x0, y0 = Drawing(640, 330, "Tiles of causal attention"), 38, 7, 70, 42
    for r in range(n):
        for c in range(n):
            colour = PALE if c > r else ORANGE if c == r else BLUE
            d.box(x0 + c * cell, y0 + r * cell, cell - 3, cell - 3, colour)
    d.text(x0 + n * cell / 2, 26, "keys")
    d.text(34, y0 + n * cell / 2, "queries")
    row = y0 + 4 * cell
    d.box(x0 - 4, row - 3, n * cell + 5, cell + 3, "none", INK)
    d.arrow(x0 + 6, row + cell / 2 - 2, x0 + 5 * cell - 8, row + cell / 2 - 2)
    x = x0 + n * cell + 34
    d.legend(
        x, y0 + 4, [(BLUE, "seen in full: no mask"), (ORANGE, "cut by the boundary"),
                    (PALE, "hidden: never visited")],
    )  # fmt: skip
    d.text(x, row + 6, "a row block: its tiles one after", at="start")
    d.text(x, row + 24, "the other, with m, l and a", at="start")
    return d.done()


def spans() -> str:
    """The three loops of key_span under a window."""
    d, w, x0 = Drawing(640, 168, "The three loops over the keys of a tile of queries"), 54, 50
    kinds = [PALE, ORANGE, ORANGE, BLUE, BLUE, BLUE, BLUE, ORANGE, ORANGE, PALE]
    for n, colour in enumerate(kinds):
        d.box(x0 + n * w, 56, w - 4, 44, colour)
    for n, name in ((1, "lo"), (3, "full_lo"), (7, "full_hi"), (9, "hi")):
        x = x0 + n * w - 2
        d.arrow(x, 34, x, 54)
        d.text(x, 26, name, 13)
    for first, last, words in ((1, 3, "EDGE"), (3, 7, "no masks"), (7, 9, "EDGE")):
        d.text(x0 + (first + last) / 2 * w - 2, 122, words, 13)
    d.text(
        320,
        152,
        "keys of one tile of queries, in tiles of BLOCK_N, under a sliding window",
        13,
        GREY,
    )
    return d.done()


def backward() -> str:
    """Who adds what in the backward pass of the CPU kernels."""
    d, w, h, x0, y0 = Drawing(640, 330, "The backward pass in chunks of keys"), 62, 52, 190, 70
    for c in range(4):
        d.text(x0 - 14, y0 + c * h + 30, f"chunk {c} of keys", 13, at="end")
        for r in range(5):
            hidden = r < c
            d.box(x0 + r * w, y0 + c * h, w - 5, h - 6, PALE if hidden else BLUE)
            if not hidden:
                d.text(x0 + r * w + (w - 5) / 2, y0 + c * h + 29, "Pᵀ, dSᵀ", 12, PAPER)
        d.arrow(x0 + 5 * w, y0 + c * h + 23, x0 + 5 * w + 26, y0 + c * h + 23)
        d.text(x0 + 5 * w + 34, y0 + c * h + 28, "dK, dV", 13, GREEN, "start")
    for r in range(5):
        x = x0 + r * w + (w - 5) / 2
        d.text(x, 34, f"block {r}", 12)
        d.arrow(x, y0 + 4 * h - 2, x, y0 + 4 * h + 16)
        d.text(x, y0 + 4 * h + 32, "dQᵀ", 13, ORANGE)
    d.text(x0 + 2.5 * w, 54, "of 64 queries", 12, GREY)
    d.text(320, 322, "down a column in the order of the chunks: a turnstile", 12.5, GREY)
    return d.done()


def split() -> str:
    """Chunks of keys and their merge."""
    d, w, x0 = Drawing(640, 262, "Splitting the keys of one head"), 128, 64
    names = ["0 … 255", "256 … 511", "512 … 767", "768 … 999"]
    d.text(320, 24, "keys and values of one head, 1000 slots of a cache", 13)
    for n, name in enumerate(names):
        wide = w - 6 if n < 3 else (w - 6) * 232 / 256
        x = x0 + n * w
        d.box(x, 38, wide, 40, BLUE)
        d.text(x + wide / 2, 63, name, 13, PAPER)
        d.arrow(x + wide / 2, 80, x + wide / 2, 112)
        d.box(x + wide / 2 - 44, 116, 88, 36, PAPER, INK)
        d.text(x + wide / 2, 139, f"o{'₀₁₂₃'[n]}, ℓ{'₀₁₂₃'[n]}", 14)
        d.arrow(x + wide / 2, 154, 320 + (n - 1.5) * 50, 190)
    d.box(210, 194, 220, 36, ORANGE)
    d.text(320, 217, "joined, in the order of the chunks", 13)
    d.text(320, 252, "one worker each, at the same time; q is the same for all", 12.5, GREY)
    return d.done()


def masks() -> str:
    """What six masks show, as attnkit itself says."""
    import torch

    from attnkit import masks as m
    from attnkit.backends.reference import _grid, _visible
    from attnkit.spec import AttentionSpec, TensorArgs

    n = 16
    ids = torch.tensor([0] * 6 + [1] * 3 + [2] * 7)
    shown = {
        "causal()": m.causal(),
        "sliding_window(4, 2)": m.sliding_window(4, 2),
        "causal() &amp; padding([11])": m.causal() & m.padding(torch.tensor([11])),
        "documents(ids)": m.documents(ids),
        "causal() &amp; documents(ids)": m.causal() & m.documents(ids),
        "sliding_window(2, 2) | global_tokens(2)": m.sliding_window(2, 2) | m.global_tokens(2),
    }
    d, cell = Drawing(640, 452, "Six masks"), 10
    q = torch.zeros(1, 1, n, 1)
    for place, (name, mask) in enumerate(shown.items()):
        x0, y0 = 30 + place % 3 * 208, 36 + place // 3 * 216
        parts = mask.resolve(1, 1, n, n, q.device)
        spec = AttentionSpec(1.0, parts.left, parts.right, parts.bottom_right)
        args = TensorArgs(
            bias=None if parts.dense is None else parts.dense.expand(1, 1, n, n),
            keep=parts.keep, lengths=parts.lengths, q_segments=parts.q_segments,
            k_segments=parts.k_segments, blocks=parts.blocks,
        )  # fmt: skip
        seen = _visible(_grid(q, q, args, spec, None, None, None), args, spec)
        seen = seen.expand(1, 1, n, n)[0, 0]
        d.text(x0 + n * cell / 2, y0 - 12, name, 12 if len(name) < 32 else 10.5)
        d.box(x0, y0, n * cell, n * cell, PALE)
        for i in range(n):
            row = seen[i].tolist()
            for j in range(n):
                if row[j] and (j == 0 or not row[j - 1]):
                    run = (*row, False).index(False, j) - j
                    d.box(x0 + j * cell, y0 + i * cell, run * cell, cell, BLUE)
        lines = "".join(f"M{x0 + c * cell} {y0}v{n * cell}M{x0} {y0 + c * cell}h{n * cell}"
                        for c in range(n + 1))  # fmt: skip
        d.parts.append(f"<path d='{lines}' stroke='{PAPER}'/>")
    d.text(320, 444, "rows are queries, columns are keys; blue is seen", 12.5, GREY)
    return d.done()


FIGURES: dict[str, Callable[[], str]] = {
    "tiles": tiles, "spans": spans, "backward": backward, "split": split, "masks": masks,
}  # fmt: skip

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
