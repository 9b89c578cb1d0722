"""Generates the pages of results and benchmarks: python scripts/report.py [--check].

From docs/results.json come docs/generated/results.md, its pictures and README.md's table; from the
files in docs/generated/benchmarks, docs/generated/benchmarks.md; from those in docs/generated/rules
the tables of docs/meta_learning.md. README.md and docs/meta_learning.md are written by hand, except
between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. With --check nothing is written, and the
exit code is 1 if a page is out of date.
"""

import pathlib

from podracers import errors
from podracers.commands import command_line
from podracers.scripts.benchmarks import records
from podracers.scripts.results import markdown, plotting, rules, tables
from podracers.scripts.results import rows as results


def main() -> int:
    """Parses the command line, and writes or checks the pages."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    root = results.PATH.parent.parent
    parser.add_argument("--root", type=pathlib.Path, default=root, metavar="DIR")
    options = parser.parse_args()
    docs = options.root / "docs"
    generated, rows = docs / "generated", results.read(docs / "results.json")
    suites = dict.fromkeys(row.suite for row in rows.values() if row.suite)
    panels = {name: plotting.suite(results.find(rows, suite=name)) for name in suites}
    pictures = {name: f"results/suite_{name}.png" for name, drawn in panels.items() if drawn}
    readme, of_rules = options.root / "README.md", docs / "meta_learning.md"
    evaluations = {
        path.stem: rules.read(path) for path in sorted((generated / "rules").glob("*.json"))
    }
    tables_of_rules = {name: rules.table(found) for name, found in evaluations.items()}
    pages = {
        generated / "results.md": tables.page(rows, pictures),
        generated / "benchmarks.md": records.page(generated / "benchmarks"),
        readme: markdown.fill(markdown.read(readme), {"readme": tables.headlines(rows)}),
        of_rules: markdown.fill(markdown.read(of_rules), tables_of_rules),
    }
    if options.check:
        stale = [path for path, text in pages.items() if markdown.read(path) != text]
        for path in stale:
            print(f"{path}: out of date")
        return errors.RunFailure.exit_code if stale else 0
    for path, text in pages.items():
        markdown.write(path, text)
        print(path)
    for name, path in pictures.items():
        columns = plotting.columns(results.find(rows, suite=name))
        plotting.save(plotting.page(panels[name], "evaluation/return", columns), generated / path)
        print(generated / path)
    return 0


if __name__ == "__main__":
    command_line.run(main)
