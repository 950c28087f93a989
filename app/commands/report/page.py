"""The page of a report: Markdown from a template, and HTML from that Markdown."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt

# Of Markdown only what the template writes: a name like __x__ stays as it is.
READER = MarkdownIt("zero").enable(["heading", "list", "table", "backticks", "image"])


def as_markdown(table: pd.DataFrame) -> str:
    """A table of texts in GitHub's Markdown; its first column holds words, the others numbers."""
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    lines = [list(table.columns), rule, *table.to_numpy().tolist()]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def to_markdown(content: dict[str, Any], folder: Path, title: bool = True) -> str:
    """The page, with links to pictures that hold for a file in `folder`."""
    templates = _templates()
    templates.filters["table"] = as_markdown
    text = templates.get_template("page.md.j2").render(
        content, title=title, link=lambda path: Path(os.path.relpath(path, folder)).as_posix()
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def to_html(content: dict[str, Any], folder: Path) -> str:
    """The page as one HTML file, with the pictures, which are in `folder`."""

    def inline(source: re.Match[str]) -> str:
        data = base64.b64encode((folder / unquote(source[1])).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = READER.render(to_markdown(content, folder))
    body = re.sub(r'(?<=<img )src="([^"]+)"', inline, body)
    body = re.sub(r"<th\b", '<th scope="col"', body)
    body = body.replace("<table>", '<div class="scroll"><table>')
    body = body.replace("</table>", "</table></div>")
    return _templates().get_template("page.html.j2").render(body=body)


def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
