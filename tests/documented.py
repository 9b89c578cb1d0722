"""The metrics that docs/usage.md describes."""

import functools
import pathlib
import re
from collections.abc import Iterable

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "usage.md"


@functools.cache
def metrics() -> tuple[str, ...]:
    """Returns the names in the table; `<...>` is a placeholder."""
    section = PAGE.read_text().partition("## What each metric means")[2]
    return tuple(re.findall(r"^\| `([^`]+)` \|", section, re.M))


def undocumented(names: Iterable[str]) -> set[str]:
    """Returns the names that are not in the table."""
    patterns = [re.sub(r"<\w+>", ".+", re.escape(name)) for name in metrics()]
    return {name for name in names if not any(re.fullmatch(p, name) for p in patterns)}
