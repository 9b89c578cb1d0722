"""Links between the pages of this repository lead somewhere, and tables are shown as tables."""

import pathlib
import re
import subprocess

import markdown_it
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _anchors(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if ":" in target:  # elsewhere
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in _anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_shown_as_tables(page):
    lines = page.read_text().splitlines()
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse("\n".join(lines))
    shown = set()  # lines within tables, and within blocks that show what they hold as it is
    for token in tokens:
        if token.type in ("table_open", "fence", "code_block"):
            shown |= set(range(*token.map))
    lost = [line for n, line in enumerate(lines) if line.startswith("|") and n not in shown]
    assert lost == []


def _make(*arguments):
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_times_are_said_by_the_readme_as_by_make():
    makefile = (ROOT / "Makefile").read_text()
    times = dict(re.findall(r"^(TRAIN|TEST|CHECK)_TIME := (.+)$", makefile, re.M))
    readme, shown = " ".join((ROOT / "README.md").read_text().split()), _make("help")
    for target, said in times.items():
        assert said in shown
        name = target.lower()
        assert re.search(rf"`make {name}` (takes )?{re.escape(said)}", readme), name
    # Before it begins.
    assert f"test suite: {times['TEST']}" in _make("-n", "test", "STAMP=setup.cfg")
    assert times["TRAIN"] in _make("-n", "train", "STAMP=setup.cfg")
    other = _make("-n", "train", "STAMP=setup.cfg", "EXPERIMENT=catch_dqn")
    assert times["TRAIN"] not in other and "docs/generated/results.md" in other
