"""Generates tables and pictures: python scripts/report.py [--check].

docs/results.md and README.md show docs/results.json, docs/generated/benchmarks.md the files in
docs/generated/benchmarks, docs/meta_learning.md those in docs/rules. Only text between
`<!-- begin: NAME -->` and `<!-- end: NAME -->` is replaced. With --check nothing is written, and
the exit code is 1 if a page is out of date.
"""

import pathlib

from benchmarks import records
from results import markdown, rules, suite_page, suite_picture, tables
from results import rows as results

from podracers import command_line, errors

_DOCS = results.PATH.parent


def main() -> int:
    """Parses the command line, and writes."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    for name, default in (
        ("results", results.PATH),
        ("document", _DOCS / "results.md"),
        ("readme", _DOCS.parent / "README.md"),
        ("picture", _DOCS / "results" / "returns.png"),
        ("benchmarks", _DOCS / "generated" / "benchmarks"),
        ("rules", _DOCS / "rules"),
        ("rules_document", _DOCS / "meta_learning.md"),
    ):
        parser.add_argument(f"--{name}", type=pathlib.Path, default=default, metavar="PATH")
    arguments = parser.parse_args()
    rows = results.read(arguments.results)
    made = {name: make(rows) for name, make in tables.TABLES.items()}
    document, readme = markdown.read(arguments.document), markdown.read(arguments.readme)
    judged = {path.stem: rules.read(path) for path in sorted(arguments.rules.glob("*.json"))}
    of_rules = markdown.read(arguments.rules_document)
    folder = arguments.benchmarks
    pages = {
        arguments.document: markdown.fill(document, made),
        arguments.readme: markdown.fill(readme, {"readme": tables.readme(rows)}),
        folder.with_suffix(".md"): records.page(folder),
        arguments.rules_document: markdown.fill(
            of_rules, {name: rules.table(found) for name, found in judged.items()}
        ),
    }
    if arguments.check:
        stale = [not path.exists() or path.read_text() != text for path, text in pages.items()]
        for path, differs in zip(pages, stale):
            print(f"{path}: {'differs from' if differs else 'is'} what was measured")
        return errors.RunFailure.exit_code if any(stale) else 0
    for path, text in pages.items():
        markdown.write(path, text)
    tables.draw(rows, arguments.picture)
    pictures = [arguments.picture]
    for name, chosen in suite_page.suites(rows).items():
        picture = arguments.picture.with_name(f"suite_{name}.png")
        if suite_picture.draw(chosen, picture):
            pictures.append(picture)
    print("\n".join(map(str, [*pages, *pictures])))
    return 0


if __name__ == "__main__":
    command_line.run(main)
