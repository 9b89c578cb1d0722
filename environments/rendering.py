"""Small drawings in NumPy: flat shapes with soft edges, for the frames of a video.

Points are `(x, y)` in pixels, x to the right and y downwards; colours are RGB in 0..255. An image
is a float array `[height, width, 3]` that the drawing functions paint in place, until `finish`.
"""

import numpy as np

Colour = tuple[int, int, int]
Point = tuple[float, float]

PAPER = (250, 248, 243)
LINE = (222, 217, 207)
INK = (52, 58, 70)
BLUE = (52, 120, 200)
ORANGE = (238, 122, 48)
GREEN = (64, 160, 92)


def canvas(height: int, width: int, colour: Colour = PAPER) -> np.ndarray:
    """Returns an image of one colour, float32 `[height, width, 3]`."""
    return np.broadcast_to(np.asarray(colour, np.float32), (height, width, 3)).copy()


def finish(image: np.ndarray) -> np.ndarray:
    """Returns the image as uint8 `[height, width, 3]`."""
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def capsule(image: np.ndarray, start: Point, end: Point, radius: float, colour: Colour) -> None:
    """Paints a thick line with round ends.

    Args:
      image: `[height, width, 3]`, painted in place.
      start: one end of its axis.
      end: the other end; the same point gives a disc.
      radius: half of its thickness, in pixels.
      colour: the colour to paint it with.
    """
    x, y = _pixel_centres(image)
    (x0, y0), (x1, y1) = start, end
    length2 = (x1 - x0) ** 2 + (y1 - y0) ** 2
    along = ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / max(length2, 1e-9)
    along = np.clip(along, 0.0, 1.0)
    distance = np.hypot(x - x0 - along * (x1 - x0), y - y0 - along * (y1 - y0))
    _blend(image, distance - radius, colour)


def disc(image: np.ndarray, centre: Point, radius: float, colour: Colour) -> None:
    """Paints a disc (see `capsule`)."""
    capsule(image, centre, centre, radius, colour)


def box(image: np.ndarray, centre: Point, size: Point, colour: Colour, corner: float = 0.0) -> None:
    """Paints an upright rectangle with rounded corners.

    Args:
      image: `[height, width, 3]`, painted in place.
      centre: its middle.
      size: its width and height.
      colour: the colour to paint it with.
      corner: radius of its corners, in pixels.
    """
    x, y = _pixel_centres(image)
    beyond_x = np.abs(x - centre[0]) - size[0] / 2 + corner
    beyond_y = np.abs(y - centre[1]) - size[1] / 2 + corner
    outside = np.hypot(np.maximum(beyond_x, 0.0), np.maximum(beyond_y, 0.0))
    inside = np.minimum(np.maximum(beyond_x, beyond_y), 0.0)
    _blend(image, outside + inside - corner, colour)


def board(rows: int, columns: int, min_side: int = 240) -> tuple[np.ndarray, int]:
    """Returns an image of empty cells, and the side of a cell in pixels.

    Args:
      rows: height of the board, in cells.
      columns: width of the board, in cells.
      min_side: minimum length of the shorter side, in pixels.
    """
    side = -(-min_side // min(rows, columns))
    image = canvas(rows * side, columns * side)
    image[::side] = image[:, ::side] = LINE
    image[-1] = image[:, -1] = LINE
    return image, side


def cell_centre(row: int, column: int, side: int) -> Point:
    """Returns the middle of a cell of a `board`."""
    return (column + 0.5) * side, (row + 0.5) * side


def _pixel_centres(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the x `[1, width]` and y `[height, 1]` of the pixels' middles."""
    height, width = image.shape[:2]
    x = np.arange(width, dtype=np.float32) + 0.5
    y = np.arange(height, dtype=np.float32) + 0.5
    return x[None, :], y[:, None]


def _blend(image: np.ndarray, distance: np.ndarray, colour: Colour) -> None:
    """Paints pixels with negative signed `distance` to an edge, `[height, width]`, antialiased."""
    coverage = np.clip(0.5 - distance, 0.0, 1.0)[..., None]
    image += coverage * (np.asarray(colour, np.float32) - image)
