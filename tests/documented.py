"""Code blocks and tables of the pages, for tests that run or compare them."""

import configparser
import functools
import pathlib
import re
import shutil
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "usage.md"


@functools.cache
def setup() -> configparser.ConfigParser:
    """Returns setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def program(name: str, page: pathlib.Path = PAGE) -> str:
    """Returns the block of Python below the comment `test: name`."""
    return re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", page.read_text(), re.S)[1]


def write_files(folder: pathlib.Path) -> None:
    """Writes the files of docs/examples, and the blocks of pages below a comment `file: name`."""
    shutil.copytree(DOCS / "examples", folder, dirs_exist_ok=True)
    blocks = r"<!-- file: (\S+) -->\n```(?:python)?\n(.*?)```"
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for name, text in re.findall(blocks, page.read_text(), re.S):
            (folder / name).write_text(text)


@functools.cache
def metrics() -> tuple[str, ...]:
    """Returns the metrics that docs/usage.md describes; `<...>` is a placeholder."""
    section = PAGE.read_text().partition("## Metrics")[2]
    return tuple(re.findall(r"^\| `([^`]+)` \|", section, re.M))


def undocumented(names: Iterable[str]) -> set[str]:
    """Returns the names that are not in the table."""
    patterns = [re.sub(r"<\w+>", ".+", re.escape(name)) for name in metrics()]
    return {name for name in names if not any(re.fullmatch(p, name) for p in patterns)}
