"""A report as Markdown and as one HTML file with everything in it."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Items:
    items: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table; its first column holds words, the others numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    path: Path
    alt: str
    caption: str


Block = Heading | Text | Items | Grid | Picture


def to_markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The blocks as GitHub's Markdown; pictures are linked relative to `folder`."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Items(items):
            return "\n".join(f"- {item}" for item in items)
        case Grid(header, rows):
            rule = ["---", *("---:" for _ in header[1:])]
            lines = [header, rule, *rows]
            return "\n".join(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
                for line in lines
            )
        case Picture(path, alt, caption):
            link = Path(os.path.relpath(path, folder)).as_posix()
            return f"![{alt}]({link})\n\n{caption}"


STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
  max-width: 62rem; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 2rem; } h3 { font-size: 1.1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 11rem; }
tbody tr:nth-child(even) { background: #f6f6f6; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
figcaption { font-size: .875rem; color: #444; }
code { overflow-wrap: anywhere; }
@page { size: A4 landscape; margin: 12mm; }
@media print {
  body { max-width: none; font-size: 10pt; padding: 0; }
  .scroll { overflow: visible; } table { font-size: 7pt; } th, td { padding: .15rem .3rem; }
  td { white-space: normal; }
  figure, table { break-inside: avoid; } h2, h3 { break-after: avoid; }
}
"""


def to_html(blocks: Sequence[Block]) -> str:
    """The blocks as one HTML file, pictures included."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    body = "\n".join(map(_html, blocks))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Items(items):
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        case Grid(header, rows):
            head = "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in header)
            lines = "".join(
                "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>\n"
                for row in rows
            )
            return (
                f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
                f"<tbody>\n{lines}</tbody>\n</table></div>"
            )
        case Picture(path, alt, caption):
            data = base64.b64encode(path.read_bytes()).decode()
            return (
                f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
                f"<figcaption>{_inline(caption)}</figcaption></figure>"
            )


def _inline(text: str) -> str:
    """Escapes a text; `code` between backticks becomes <code>."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:  # a backtick on its own
        return escape(text)
    return "".join(
        f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts)
    )
