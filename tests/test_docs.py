"""Pages: links and paths lead somewhere, and tables are shown as tables."""

import pathlib
import pkgutil
import re

import markdown_it
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def _anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_tables(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if ":" in target:  # another site
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target
    lines, shown = text.splitlines(), set()  # lines of tables and of code blocks
    for token in markdown_it.MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in ("table_open", "fence", "code_block"):
            shown |= set(range(*token.map))
    assert [line for n, line in enumerate(lines) if line.startswith("|") and n not in shown] == []


_BY_HAND = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", _BY_HAND, ids=lambda page: page.stem)
def test_paths(page):
    folders = "agents|docs|environments|gin|notebooks|podracers|scripts|tests"
    paths = re.findall(
        rf"(?<![\w/.-])((?:{folders})/[\w/]+\.(?:gin|ipynb|md|py|sh))", page.read_text()
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_program_and_gin_file_is_run_by_a_test(page):
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    blocks = re.findall(r"^(.*)\n```(?:python\n|\nfrom __gin__)", page.read_text(), re.M)
    names = [re.fullmatch(r"<!-- (?:test|file): ([\w ]+)(?:\.py|\.gin)? -->", x) for x in blocks]
    assert [x for x, name in zip(blocks, names) if not name or f'"{name[1]}' not in tests] == []


# Parts that no user imports or names in a .gin file, and packages whose modules are listed.
_UNLISTED = {"backends", "meta", "rendering", "ring_buffer", "sum_tree"}


def test_the_reference_lists_all_agents_networks_and_environments():
    listed = re.findall(r"^   ([\w.]+)$", (ROOT / "docs" / "api.rst").read_text(), re.M)
    assert len(listed) == len(set(listed))
    rooms = ("parts", "replay", "search", "networks")
    packages = ("agents", *(f"agents/{room}" for room in rooms), "environments")
    modules = (
        module
        for package in packages
        for module in pkgutil.iter_modules([str(ROOT / package)], f"{package.replace('/', '.')}.")
    )
    names = {module.name for module in modules} - {f"agents.{room}" for room in rooms}
    assert {name.rpartition(".")[2] for name in names - set(listed)} <= _UNLISTED
