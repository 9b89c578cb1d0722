"""Small drawings by Pillow: flat shapes with soft edges, for the frames of a video.

Points are `(x, y)` in pixels, x to the right and y downwards; colours are RGB in 0..255.
"""

import numpy as np
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Point = tuple[float, float]

PAPER = (250, 248, 243)
LINE = (222, 217, 207)
INK = (52, 58, 70)
BLUE = (52, 120, 200)
ORANGE = (238, 122, 48)
GREEN = (64, 160, 92)
_FINE = 4  # painted pixels for the side of a pixel, which is their mean: edges are soft


class Canvas:
    """An image of `height` x `width` pixels that the methods paint."""

    def __init__(self, height: int, width: int):
        self._image = Image.new("RGB", (_FINE * width, _FINE * height), PAPER)
        self._draw = ImageDraw.Draw(self._image)

    def finish(self) -> np.ndarray:
        """Returns the image as uint8 `[height, width, 3]`."""
        return np.array(self._image.reduce(_FINE))

    def box(self, centre: Point, size: Point, colour: Colour, corner: float = 0.0) -> None:
        """Paints an upright rectangle, whose corners have the radius `corner`."""
        low, high = ([_FINE * (c + s * x / 2) for c, x in zip(centre, size)] for s in (-1, 1))
        corners = *low, high[0] - 1, high[1] - 1  # Pillow paints the last pixel, too
        self._draw.rounded_rectangle(corners, _FINE * corner, colour)

    def disc(self, centre: Point, radius: float, colour: Colour) -> None:
        """Paints a disc."""
        self.box(centre, (2 * radius, 2 * radius), colour, radius)

    def capsule(self, start: Point, end: Point, radius: float, colour: Colour) -> None:
        """Paints a thick line with round ends; its `radius` is half of its thickness, in pixels."""
        points = [(_FINE * x, _FINE * y) for x, y in (start, end)]
        self._draw.line(points, colour, round(2 * _FINE * radius))
        self.disc(start, radius, colour)
        self.disc(end, radius, colour)


def board(rows: int, columns: int, min_side: int = 240) -> tuple[Canvas, int]:
    """Returns an image of empty cells, and the side of a cell in pixels.

    The shorter side of the image has at least `min_side` pixels.
    """
    side = -(-min_side // min(rows, columns))
    image = Canvas(rows * side, columns * side)
    for row in range(rows + 1):
        image.capsule((0, row * side), (columns * side, row * side), 0.5, LINE)
    for column in range(columns + 1):
        image.capsule((column * side, 0), (column * side, rows * side), 0.5, LINE)
    return image, side


def cell_centre(row: int, column: int, side: int) -> Point:
    """Returns the middle of a cell of a `board`."""
    return (column + 0.5) * side, (row + 0.5) * side
