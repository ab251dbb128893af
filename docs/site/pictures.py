"""Draw the pictures of docs/concepts.md as SVG files: `python docs/site/pictures.py`.

What they show is computed by `sdm.ops` on a memory of 64 slots, from fixed random numbers. Shape letters: N slots, D
value channels, W writes, R reads, T tokens.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from sdm import ops

FOLDER = Path(__file__).resolve().parents[1] / "figures"
SIDE, N, D, W = 8, 64, 8, 4
INK, BLUE, ORANGE, GREEN, PALE = "#222222", "#3b6fb6", "#e07b39", "#3a9a5b", "#f3f3f3"
CELL = 26


class Picture:
    """An SVG file, line by line."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" font-family="sans-serif">',
            f"<title>{title}</title>",
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        ]

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, line: str = "#bbbbbb") -> None:
        """Draw a rectangle."""
        box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {box} fill="{fill}" stroke="{line}"/>')

    def frame(self, x: float, y: float, color: str) -> None:
        """Mark a cell."""
        box = f'x="{x + 1.5:g}" y="{y + 1.5:g}" width="{CELL - 3}" height="{CELL - 3}"'
        self.parts.append(f'<rect {box} fill="none" stroke="{color}" stroke-width="3"/>')

    def text(self, x: float, y: float, words: str, size: int = 14, anchor: str = "start", color: str = INK) -> None:
        """Write a line."""
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}"'
        self.parts.append(f"<text {place}>{words}</text>")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow."""
        angle = math.atan2(to_y - y, to_x - x)
        tip = [(to_x - 9 * math.cos(angle + side), to_y - 9 * math.sin(angle + side)) for side in (-0.4, 0.4)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in ((to_x, to_y), *tip))
        self.parts.append(f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK}" stroke-width="2"/>')
        self.parts.append(f'<polygon points="{points}" fill="{INK}"/>')

    def grid(self, x: float, y: float, values: Tensor, color: str, marked: Tensor | None = None) -> None:
        """Draw the slots as a square, stronger where `values` [N] is larger, and frame those of `marked`."""
        for slot, value in enumerate(values.tolist()):
            place = x + slot % SIDE * CELL, y + slot // SIDE * CELL
            self.rectangle(*place, CELL, CELL, shade(color, value))
        for slot in () if marked is None else marked.tolist():
            self.frame(x + slot % SIDE * CELL, y + slot // SIDE * CELL, ORANGE)

    def save(self, name: str, folder: Path) -> None:
        """Write the file."""
        (folder / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n", encoding="utf-8")


def shade(color: str, share: float) -> str:
    """Return a colour between nearly white (0) and `color` (1), in 24 steps so that rounding does not show."""
    share = round(24 * min(max(share, 0.0), 1.0)) / 24
    ends = zip((PALE[1:3], PALE[3:5], PALE[5:7]), (color[1:3], color[3:5], color[5:7]), strict=True)
    return "#" + "".join(f"{round(int(low, 16) + share * (int(high, 16) - int(low, 16))):02x}" for low, high in ends)


def addresses(scores: Tensor, k: int = W) -> tuple[Tensor, Tensor]:
    """Return slots and softmax weights [..., k] of scores [..., 2 sqrt(N)]."""
    values, index = ops.product_key_topk(scores, k)
    return index, values.softmax(-1)


def product_keys(folder: Path) -> None:
    """Two short lists of scores address a square of slots."""
    scores = torch.randn(2 * SIDE, generator=torch.Generator().manual_seed(3))
    index, _ = addresses(scores)
    rows, columns = scores[:SIDE], scores[SIDE:]
    sums = (rows[:, None] + columns).flatten()
    low, high = float(sums.min()), float(sums.max())
    picture = Picture(560, 330, "Product keys: 8 row scores and 8 column scores give 64 slots; the best 4 are chosen")
    left, top = 110, 70
    for place in range(SIDE):
        y, x = top + place * CELL, left + place * CELL
        picture.rectangle(left - 44, y, 34, CELL, shade(BLUE, (float(rows[place]) + 2.5) / 5))
        picture.text(left - 27, y + 18, f"{float(rows[place]):.1f}", 12, "middle")
        picture.rectangle(x, top - 36, CELL, 26, shade(BLUE, (float(columns[place]) + 2.5) / 5))
        picture.text(x + 13, top - 18, f"{float(columns[place]):.1f}", 11, "middle")
    picture.grid(left, top, (sums - low) / (high - low), GREEN, index)
    picture.text(left, top - 46, "column scores", 13)
    picture.text(left - 44, top - 10, "rows", 13)
    x = left + SIDE * CELL + 24
    for line, words in enumerate(
        (
            "16 scores from one projection",
            "address 8 x 8 = 64 slots.",
            "A slot's score is the sum of",
            "its row's and its column's.",
            "The 4 best (framed) are found",
            "without looking at all 64:",
            "top 4 rows x top 4 columns",
            "hold them.",
        )
    ):
        picture.text(x, top + 18 + 24 * line, words)
    picture.text(left, top + SIDE * CELL + 30, "Level 13 of the paper: 960 scores per head address 230,400 slots.", 13)
    picture.save("product-keys.svg", folder)


def memory() -> tuple[Tensor, Tensor, Tensor]:
    """Return a memory [N,D] after some writes, and the slots and weights of one more."""
    random = torch.Generator().manual_seed(5)
    index, weight = addresses(torch.randn(1, 14, 1, 2 * SIDE, generator=random))
    value = torch.randn(1, 14, 1, D, generator=random)
    beta, decay = torch.full((1, 14, 1), 0.8), torch.full((1, 14, 1), -0.02)
    _, state = ops.sparse_delta_rule(
        index, weight, value, beta, decay, index, weight, num_slots=N, output_final_state=True, backend="reference"
    )
    index, weight = addresses(torch.randn(1, 1, 1, 2 * SIDE, generator=random))
    return state[0, 0], index[0, 0, 0], weight[0, 0, 0]


def write(folder: Path) -> None:
    """One write changes W slots and leaves the others."""
    before, index, weight = memory()
    value = torch.randn(D, generator=torch.Generator().manual_seed(8))
    after = before.clone()
    after[index] += 0.9 * weight[:, None] * (value - weight @ before[index])
    largest = float(torch.stack([before, after]).norm(dim=-1).max())
    picture = Picture(760, 330, "A write: four slots move towards the new value, sixty stay as they are")
    picture.text(30, 40, "before")
    picture.grid(30, 60, before.norm(dim=-1) / largest, BLUE, index)
    picture.text(520, 40, "after")
    picture.grid(520, 60, after.norm(dim=-1) / largest, BLUE, index)
    picture.arrow(270, 165, 500, 165)
    for line, words in enumerate(("read the 4 slots: Σ k_j M[j]", "compare with the value v", "write β k_i (v - Σ)")):
        picture.text(385, 100 + 22 * line, words, 13, "middle")
    shares = ", ".join(f"{share:.2f}" for share in weight.tolist())
    picture.text(385, 200, f"weights k: {shares}", 13, "middle")
    picture.text(
        30, 305, "Colour: length of a slot's row. Framed: the slots of this token. All 60 others are unchanged.", 13
    )
    picture.save("write.svg", folder)


def read(folder: Path) -> None:
    """A read is a weighted sum of R slots."""
    state, index, weight = memory()
    picture = Picture(760, 330, "A read: the weighted sum of four slots")
    picture.text(30, 40, "memory: 64 rows of 8 channels")
    picture.grid(30, 60, state.norm(dim=-1) / float(state.norm(dim=-1).max()), BLUE, index)
    largest = float(state[index].abs().max())
    for place, (slot, share) in enumerate(zip(index.tolist(), weight.tolist(), strict=True)):
        y = 70 + 44 * place
        picture.text(380, y + 19, f"{share:.2f} x row {slot}", 13, "end")
        for channel in range(D):
            value = float(state[slot, channel]) / largest
            color = shade(BLUE if value > 0 else ORANGE, abs(value))
            picture.rectangle(390 + channel * CELL, y, CELL, CELL, color)
    picture.arrow(250, 165, 290, 165)
    y = 70 + 44 * len(index) + 6
    picture.text(380, y + 19, "sum = reading", 13, "end")
    total = weight @ state[index]
    for channel in range(D):
        value = float(total[channel]) / largest
        picture.rectangle(390 + channel * CELL, y, CELL, CELL, shade(BLUE if value > 0 else ORANGE, abs(value)), INK)
    picture.text(30, 305, "Blue: positive, orange: negative.", 13)
    picture.save("read.svg", folder)


def over_time(folder: Path) -> None:
    """Slots against tokens: what is written stays until it is overwritten or fades."""
    tokens = 48
    random = torch.Generator().manual_seed(11)
    scores = torch.randn(1, tokens, 1, 2 * SIDE, generator=random)
    scores[:, 40] = scores[:, 6]  # a key that comes back
    index, weight = addresses(scores)
    value = torch.randn(1, tokens, 1, D, generator=random)
    beta, decay = torch.full((1, tokens, 1), 0.8), torch.full((1, tokens, 1), -0.05)
    picture = Picture(760, 440, "The state over time: each token writes four of 64 slots")
    cell, left, top, state, strongest = 13, 80, 50, None, 0.0
    columns = []
    for token in range(tokens):
        at = slice(token, token + 1)
        call = index[:, at], weight[:, at], value[:, at], beta[:, at], decay[:, at], index[:, at], weight[:, at]
        _, state = ops.sparse_delta_rule(
            *call, initial_state=state, num_slots=N, output_final_state=True, backend="reference"
        )
        columns.append(state[0, 0].norm(dim=-1))
        strongest = max(strongest, float(columns[-1].max()))
    for token, lengths in enumerate(columns):
        for slot, length in enumerate(lengths.tolist()):
            fill = shade(BLUE, length / strongest)
            picture.parts.append(
                f'<rect x="{left + token * cell}" y="{top + slot * 5}" width="{cell - 1}" height="5" fill="{fill}"/>'
            )
        for slot in index[0, token, 0].tolist():
            box = f'x="{left + token * cell}" y="{top + slot * 5}" width="{cell - 1}" height="5"'
            picture.parts.append(f'<rect {box} fill="none" stroke="{ORANGE}"/>')
    for token, words in ((6, "key A"), (40, "key A again")):
        picture.arrow(left + token * cell + 6, 30, left + token * cell + 6, top - 3)
        picture.text(left + token * cell + 6, 24, words, 13, "middle")
    picture.text(20, top + 160, "slots", 14)
    picture.text(left + tokens * cell / 2, top + 64 * 5 + 22, "tokens", 14, "middle")
    picture.text(
        left, top + 64 * 5 + 46, "Orange: slots that a token writes. A slot keeps its row until another token comes", 13
    )
    picture.text(left, top + 64 * 5 + 64, "to it: forgetting, too, touches only the slots of the token at hand.", 13)
    picture.save("state-over-time.svg", folder)


def main(folder: Path = FOLDER) -> None:
    """Draw all pictures into a folder."""
    for draw in (product_keys, write, read, over_time):
        draw(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
