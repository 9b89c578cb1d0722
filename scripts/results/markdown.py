"""Tables in Markdown, and pages with parts that are made by a script."""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

from podracers import errors


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table as Markdown."""
    made = [headings, ["---"] * len(headings), *lines]
    cells = [[cell.replace("|", r"\|") for cell in line] for line in made]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Returns a page with other parts between their marks, `<!-- begin: NAME -->` and `end`.

    Raises:
      errors.UserError: a mark is missing, or is there twice.
    """
    for name, part in parts.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        pattern = f"(?<={re.escape(begin)}).*?(?={re.escape(end)})"
        text, found = re.subn(pattern, lambda _, made=part: made, text, flags=re.DOTALL)
        if found != 1:
            raise errors.UserError(
                f"the page has {found} places for '{name}', expected one: "
                f"'{begin.strip()}' and '{end}'"
            )
    return text


def read(path: pathlib.Path) -> str:
    """Returns the text of a page.

    Raises:
      errors.UserError: it cannot be read.
    """
    try:
        return path.read_text()
    except OSError as error:
        raise errors.UserError(f"cannot read '{path}': {error.strerror}") from error


def write(path: pathlib.Path, text: str) -> None:
    """Writes a page.

    Raises:
      errors.UserError: it cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise errors.UserError(f"cannot write '{path}': {error.strerror}") from error
