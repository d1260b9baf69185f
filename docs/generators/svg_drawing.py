"""A drawing as SVG text: rectangles, lines, dots and words in pixels, on a white sheet that suits both themes."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

__all__ = ["BLUE", "DARK", "GREEN", "GREY", "LIGHT", "ORANGE", "RED", "Drawing"]

BLUE, GREEN, ORANGE, RED, GREY = "#4c78a8", "#54a24b", "#f58518", "#c23b3b", "#9a9a9a"
DARK, LIGHT = "#333333", "#e8e8e8"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A sheet of a size, to which shapes are added; `str` is the SVG."""

    width: float
    height: float
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, color: str, note: str = "") -> None:
        """A filled rectangle; a browser shows the note where the mouse rests."""
        shown = f"<title>{escape(note)}</title>" if note else ""
        at = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}"'
        self.shapes.append(f'<rect {at} fill="{color}" stroke="white" stroke-width="0.5">{shown}</rect>')

    def dot(self, x: float, y: float, color: str, note: str = "", radius: float = 3.0) -> None:
        """A filled circle."""
        shown = f"<title>{escape(note)}</title>" if note else ""
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}">{shown}</circle>')

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = GREY, dashes: str = "") -> None:
        """A line."""
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.shapes.append(f'<line {ends} stroke="{color}" stroke-dasharray="{dashes}"/>')

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", color: str = DARK, size: int = 12) -> None:
        """Words, which start, have their middle or end at x."""
        style = f'font-size="{size}" text-anchor="{anchor}" fill="{color}"'
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>')

    def legend(self, x: float, y: float, entries: dict[str, str], step: float = 110) -> None:
        """Colours with what they stand for, in a row."""
        for index, (words, color) in enumerate(entries.items()):
            self.box(x + index * step, y - 9, 10, 10, color)
            self.text(x + index * step + 14, y, words)

    def __str__(self) -> str:
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        sheet = f'<rect width="{self.width:g}" height="{self.height:g}" rx="6" fill="white"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif">'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", sheet, *self.shapes, "</svg>\n"])
