"""Tables in Markdown, pages with generated parts, and the files of results."""

import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from podracers import errors


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table."""
    rows = [headings, ["---"] * len(headings), *lines]
    cells = [[cell.replace("|", r"\|") for cell in line] for line in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Replaces the parts between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.

    Raises:
      errors.UserError: a mark is missing or occurs twice.
    """
    for name, part in parts.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        pattern = f"(?<={re.escape(begin)}).*?(?={re.escape(end)})"
        text, count = re.subn(pattern, lambda _, new=part: new, text, flags=re.DOTALL)
        if count != 1:
            raise errors.UserError(f"expected one '{begin.strip()}' and '{end}', found {count}")
    return text


def read(path: pathlib.Path) -> str:
    """Returns the text of a file; raises errors.UserError if it cannot be read."""
    with errors.file_errors(f"read '{path}'"):
        return path.read_text("utf-8")


def read_json(path: pathlib.Path, make: Callable[[Any], Any]) -> Any:
    """Returns `make` of a JSON file; raises errors.UserError if it has another schema."""
    try:
        return make(json.loads(read(path)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = errors.one_line(error)
        raise errors.UserError(f"'{path}' is no file of results ({reason})") from error


def without_empty(value: Any) -> Any:
    """Returns a value of JSON without the fields of its objects that are empty."""
    if isinstance(value, dict):
        pairs = value.items()
        return {key: without_empty(part) for key, part in pairs if part not in (None, (), [], "")}
    return [*map(without_empty, value)] if isinstance(value, list | tuple) else value


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file; raises errors.UserError if that is impossible."""
    with errors.file_errors(f"write '{path}'"):
        path.write_text(text, "utf-8")
