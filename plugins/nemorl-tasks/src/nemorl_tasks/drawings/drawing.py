"""Drawings and what is true of them, a row at a time."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemorl_tasks.drawings.config import DrawingsConfig

COLOURS = {"r": (220, 30, 30), "g": (30, 180, 30), "b": (30, 30, 220), "y": (230, 220, 30)}
PAPER = (245, 245, 245)
CELLS = 4
"""Of each side: a shape has a cell to itself."""
PLACES = {"l": (0, None), "r": (CELLS - 1, None), "t": (None, 0), "b": (None, CELLS - 1)}
"""Column and row of the cell of a shape at that edge; ``None``: one of those in the middle."""
QUESTIONS = {"count": "how many?", "colour": "which colour?", "place": "where?"}


class Drawings(Sequence[Any]):
    """The rows of a split."""

    def __init__(self, config: DrawingsConfig, split: str, count: int) -> None:
        self._config, self._split, self._count = config, split, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = range(self._count)[index]
        config = self._config
        data, answer = drawn(config, random.Random(f"{config.task}/{config.seed}/{self._split}/{number}"))
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        asked = [{"type": "image", "image": url}, {"type": "text", "text": QUESTIONS[config.task]}]
        return {"prompt": [{"role": "user", "content": asked}], "answer": answer, "response": answer}


def drawn(config: DrawingsConfig, draw_from: random.Random) -> tuple[bytes, str]:
    """A drawing as PNG, and the answer to the question of the task."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (config.size, config.size), PAPER)
    draw, cell = ImageDraw.Draw(image), config.size / CELLS
    colour = draw_from.choice(list(COLOURS))
    count = draw_from.randint(1, 4) if config.task == "count" else 1
    cells = [(x, y) for x in range(CELLS) for y in range(CELLS)]
    place = draw_from.choice(list(PLACES))
    if config.task == "place":
        column, row = PLACES[place]
        middle = draw_from.randint(1, CELLS - 2)
        cells = [(middle if column is None else column, middle if row is None else row)]
    for x, y in draw_from.sample(cells, count):
        left, top = (place * cell + draw_from.random() * cell / 7 for place in (x, y))
        shape = draw.ellipse if draw_from.random() < 0.5 else draw.rectangle
        if not config.blank:
            shape([left, top, left + cell * 5 / 7, top + cell * 5 / 7], fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), {"count": str(count), "colour": colour, "place": place}[config.task]
