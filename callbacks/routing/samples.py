"""Samples with their tokens coloured by expert: patches of images, text as a picture and a page.

Experts are told apart by a colour (eight of them, in turn by slot) and, where there are more
experts than colours, by the number of their slot as well. A token that several experts take has the
colour of the one with the largest gate; where the gates are equal (DynMoE), of the most similar
one. These pictures hold thousands of small pieces, so they are drawn as pixels.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.colors import to_rgb
from PIL import Image, ImageDraw
from torch import Tensor

from app.figures import COLORS, font
from app.moe import Routing
from app.tasks.samples import ImageSamples, TextSamples, spread

COLUMNS = 80  # characters of a line of text
NONE = -1  # in place of a slot: no expert
TILE = 112  # pixels of an image's side, at least
CELL = 19  # pixels of a patch with a number in it
NUMBERED_PATCHES = 16  # a row of more patches than this has no room for numbers


@dataclass(frozen=True)
class Choices:
    """What the tokens of a few samples took, in one layer (B samples of S tokens).

    Attributes:
        first_BS: the expert that stands for each token's; -1 where it took none of its own accord.
        gates_BSE: gates of the executed pairs, NaN elsewhere.
    """

    first_BS: Tensor
    gates_BSE: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, routing: Routing, rows: list[int], length: int) -> Choices:
        """Reads samples off a routing of whole samples, on its device."""

        def pick(values: Tensor) -> Tensor:
            return values.detach().unflatten(0, (-1, length))[rows]

        mask_BSE = pick(routing.mask_TE)
        gates_BSE = pick(routing.gates_TE).masked_fill(~mask_BSE, torch.nan)
        rank_BSE = pick(routing.order_TE())
        first_BS = rank_BSE.masked_fill(~mask_BSE, -torch.inf).argmax(2)
        return cls(first_BS.masked_fill(pick(routing.unrouted_T()), -1), gates_BSE)

    @classmethod
    def join(cls, parts: list[Choices]) -> Choices:
        """Those of several batches as one, on the host."""
        return cls(
            torch.cat([part.first_BS for part in parts]).cpu(),
            torch.cat([part.gates_BSE for part in parts]).cpu(),
        )


# ---------------------------------------------------------------------- images


def patches_picture(samples: ImageSamples, layers: dict[str, Choices], note: str) -> np.ndarray:
    """Images, each beside its patches coloured by expert, layer by layer; two blocks of them.

    Returns:
        Pixels (height, width, 3), uint8.
    """
    height, width = samples.grid
    firsts = {
        layer: choices.first_BS[:, samples.prefix :].unflatten(1, (height, width)).numpy()
        for layer, choices in layers.items()
    }
    numbered = _many(firsts.values()) and max(height, width) <= NUMBERED_PATCHES
    cell = CELL if numbered else 8
    cell = max(cell, -(-TILE // max(height, width)))
    tall, wide = cell * height, cell * width
    count = len(samples.captions)
    blocks = 2 if count > 3 else 1
    down = -(-count // blocks)
    across = (wide + 8) * (1 + len(layers)) + 24
    slots = sorted({int(slot) for first in firsts.values() for slot in np.unique(first)})
    key = _legend(slots)
    page = _Page(12 + blocks * across + key.width, 56 + down * (tall + 22) + 4)
    page.write(12, 8, f"Image patches by expert{note}", 15)
    page.paste(12 + blocks * across, 36, key)
    tiles = {slot: _tile(slot, cell, numbered) for slot in slots}
    for number, caption in enumerate(samples.captions):
        block, row = divmod(number, down)
        x, y = 12 + block * across, 56 + row * (tall + 22)
        page.write(x, y, _short(caption), 11)
        page.paste(x, y + 15, _enlarged(samples.pixels[number], wide, tall))
        for place, (layer, first) in enumerate(firsts.items(), 1):
            at = x + place * (wide + 8)
            if row == 0:
                page.write(at, 36, layer, 13)
            rows = [np.concatenate([tiles[slot] for slot in line], 1) for line in first[number]]
            page.paste(at, y + 15, Image.fromarray(np.concatenate(rows)))
    return page.pixels()


def _enlarged(pixels: np.ndarray, width: int, height: int) -> Image.Image:
    if pixels.shape[-1] == 1:
        pixels = pixels.repeat(3, -1)
    small = pixels.shape[1] < width
    way = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return Image.fromarray(pixels).resize((width, height), way)


def _tile(slot: int, side: int, numbered: bool) -> np.ndarray:
    """A patch of an expert (side, side, 3), a white line at its right and lower edge."""
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, side - 2, side - 2), fill=_color(slot))
    if numbered or slot == NONE:
        text = "×" if slot == NONE else str(slot)
        middle = (side - 1) / 2
        draw.text((middle, middle), text, _ink(slot), font(min(11, side)), anchor="mm")
    return np.asarray(image)


# ---------------------------------------------------------------------- text


def tokens_picture(
    samples: TextSamples, layers: dict[str, Choices], note: str, texts: int = 2, limit: int = 240
) -> np.ndarray:
    """Texts with their tokens coloured by expert, layer by layer.

    Drawn are `texts` of the samples, evenly spread, and of each the first `limit` tokens. Where
    there are more experts than colours, each run of an expert's tokens has its slot below.

    Returns:
        Pixels (height, width, 3), uint8.
    """
    chosen = spread(len(samples.pieces), texts)
    lines = [(sample, _lines(samples.pieces[sample][:limit])) for sample in chosen]
    firsts = {layer: each.first_BS[:, :limit].numpy() for layer, each in layers.items()}
    numbered = _many(first[chosen] for first in firsts.values())
    slots = sorted({int(slot) for first in firsts.values() for slot in np.unique(first[chosen])})
    mono = font(16, "DejaVuSansMono")
    wide, tall = round(mono.getlength("M")), 32 if numbered else 24
    key = _legend(slots)
    each = sum(len(rows) * tall + 12 for _, rows in lines) + 30
    page = _Page(12 + COLUMNS * wide + 24 + key.width, 36 + len(layers) * each)
    page.write(12, 8, f"Tokens by expert{note}", 15)
    page.paste(12 + COLUMNS * wide + 24, 36, key)
    y = 36
    for layer, first in firsts.items():
        page.write(12, y, layer, 13)
        y += 22
        for sample, rows in lines:
            for row in rows:
                x, before = 12, None
                for token, text in row:
                    slot, end = int(first[sample, token]), x + len(text) * wide
                    page.token(x, y, end, y + tall - 3, text, slot, mono)
                    if numbered and slot not in (before, NONE):
                        page.write(x + 1, y + 19, str(slot), 7, _ink(slot))
                    x, before = end, slot
                y += tall
            y += 12
        y += 8
    return page.pixels()


def _lines(pieces: Sequence[str]) -> list[list[tuple[int, str]]]:
    """(token, visible text) by line; a line ends where it is full and after a line break."""
    lines: list[list[tuple[int, str]]] = [[]]
    used = 0
    for token, piece in enumerate(pieces):
        text = visible(piece)[:COLUMNS]
        if not text:
            continue
        if used + len(text) > COLUMNS:
            lines.append([])
            used = 0
        lines[-1].append((token, text))
        used += len(text)
        if piece.endswith("\n"):
            lines.append([])
            used = 0
    return [line for line in lines if line]


def visible(piece: str) -> str:
    """A token's text with its white space to be seen."""
    marks = {" ": "·", "\n": "⏎", "\t": "→", "\r": "␍"}
    return "".join(marks.get(c, c if c.isprintable() else "�") for c in piece)


# ---------------------------------------------------------------------- both


class _Page:
    """A white page to draw on."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), "white")
        self.draw = ImageDraw.Draw(self.image)

    def write(self, x: int, y: int, text: str, size: int, color: str = "black") -> None:
        self.draw.text((x, y), text, color, font(size))

    def paste(self, x: int, y: int, image: Image.Image) -> None:
        self.image.paste(image, (x, y))

    def token(self, x: int, y: int, end: int, low: int, text: str, slot: int, mono: object) -> None:
        line = "#888888" if slot == NONE else None
        self.draw.rectangle((x, y, end - 1, low), fill=_color(slot), outline=line)
        wide = (end - x) / max(1, len(text))
        for i, character in enumerate(text):  # one by one: a missing glyph must not shift a line
            self.draw.text((x + i * wide, y + 1), character, _ink(slot), mono)

    def pixels(self) -> np.ndarray:
        return np.asarray(self.image)


def _legend(slots: list[int]) -> Image.Image:
    """Colours and their experts, one line each; slots that share a colour on one line."""
    lines = [
        (color, [slot for slot in slots if slot >= 0 and slot % len(COLORS) == color])
        for color in range(len(COLORS))
    ]
    texts = [
        (color, ", ".join(map(str, own[:4])) + (", …" if len(own) > 4 else ""))
        for color, own in lines
        if own
    ]
    if NONE in slots:
        texts.append((NONE, "none"))
    wide = max([font(12).getlength(text) for _, text in texts] + [font(12).getlength("expert")])
    page = _Page(40 + round(wide), 24 + 20 * len(texts))
    page.write(4, 2, "expert", 12)
    for row, (slot, text) in enumerate(texts):
        y = 24 + 20 * row
        outline = "black" if slot == NONE else None
        page.draw.rectangle((4, y, 20, y + 13), fill=_color(slot), outline=outline)
        if slot == NONE:
            page.draw.text((12, y + 7), "×", "black", font(11), anchor="mm")
        page.write(26, y, text, 12)
    return page.image


def _many(firsts: Iterable[np.ndarray]) -> bool:
    return any(first.max() >= len(COLORS) for first in firsts)


def _color(slot: int) -> str:
    return "white" if slot == NONE else COLORS[slot % len(COLORS)]


def _ink(slot: int) -> str:
    """Black or white, whichever can be read on an expert's colour."""
    channels = np.array(to_rgb(_color(slot)))
    linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return "black" if linear @ (0.2126, 0.7152, 0.0722) > 0.18 else "white"


def _short(caption: str) -> str:
    return caption if len(caption) <= 16 else f"{caption[:15]}…"


# ---------------------------------------------------------------------- a page of text

STYLE = (
    "body{font:16px/2 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;"
    "color:#111;background:#fff}"
    "p.text{font-family:ui-monospace,'DejaVu Sans Mono',monospace;overflow-wrap:anywhere;"
    "border-left:2px solid #ccc;padding-left:1em}"
    "span{padding:2px 0;print-color-adjust:exact;-webkit-print-color-adjust:exact}"
    "sup{font:9px/1 system-ui,sans-serif;margin:0 1px}"
    "span.none{outline:1px dotted #000;outline-offset:-1px;background:#fff;color:#000}"
    "h2{font-size:1.1em}"
)


def tokens_html(samples: TextSamples, layers: dict[str, Choices], title: str) -> str:
    """A page of the texts, each run of tokens of one expert coloured and headed by its slot.

    Pointing at a token shows all of its experts with their gates.
    """
    slots = sorted({int(s) for c in layers.values() for s in c.first_BS.unique()} - {-1})
    colors = "".join(
        f"span.e{slot}{{background:{COLORS[slot % len(COLORS)]};color:{_ink(slot)}}}"
        for slot in slots
    )
    key = " ".join(f'<span class="e{slot}">&nbsp;{slot}&nbsp;</span>' for slot in slots)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{STYLE}{colors}</style>",
        f"<h1>{html.escape(title)}</h1>",
        "<p>The small number before a run of tokens is the slot of the expert of largest gate "
        "(of equal gates, the most similar one); pointing at a token shows all of its experts. "
        'A dotted frame and × stand for <span class="none">no expert</span>. '
        f"· is a space, ⏎ a line break, → a tab. Experts: {key}</p>",
    ]
    for layer, choices in layers.items():
        parts.append(f"<h2>{html.escape(layer)}</h2>")
        for sample, pieces in enumerate(samples.pieces):
            parts.append(f'<p class="text">{_runs(pieces, choices, sample)}</p>')
    return "\n".join([*parts, "</html>\n"])


def _runs(pieces: list[str], choices: Choices, sample: int) -> str:
    first_S, gates_SE = choices.first_BS[sample].tolist(), choices.gates_BSE[sample].tolist()
    out, before = [], None
    for piece, slot, gates in zip(pieces, first_S, gates_SE, strict=True):
        if not piece:
            continue
        mark = f"<sup>{'×' if slot < 0 else slot}</sup>" if slot != before else ""
        taken = ", ".join(f"{e}: {gate:.2f}" for e, gate in enumerate(gates) if gate == gate)
        tip = f"expert {taken}" if taken else "no expert"
        kind = "none" if slot < 0 else f"e{slot}"
        text = html.escape(visible(piece)) + "<br>" * piece.endswith("\n")
        out.append(f'<span class="{kind}" title="{tip}">{mark}{text}</span>')
        before = None if piece.endswith("\n") else slot
    return "".join(out)
