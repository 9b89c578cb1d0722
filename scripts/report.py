"""Generates the pages of results and benchmarks: python scripts/report.py [--check].

From docs/results.json come docs/generated/results.md, its pictures, docs/learning_curves.png and
README.md's table of results; from the files in docs/generated/benchmarks,
docs/generated/benchmarks.md and README.md's table of speeds; from those in docs/generated/rules,
docs/generated/rules.md. README.md is written by hand, except between `<!-- begin: NAME -->` and
`<!-- end: NAME -->`. A picture that shows the recorded curves is not drawn again. With --check
nothing is written, and the exit code is 1 if a page or a picture is out of date.
"""

import pathlib

from podracers import errors
from podracers.commands import command_line
from podracers.scripts.benchmarks import records
from podracers.scripts.results import markdown, plotting, rules, tables
from podracers.scripts.results import rows as results

ROOT = results.PATH.parent.parent


def main() -> int:
    """Parses the command line, and writes or checks the pages."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, metavar="DIR")
    options = parser.parse_args()
    stale = update(options.root, write=not options.check)
    for path in stale:
        print(f"{path}: out of date" if options.check else path)
    return errors.RunFailure.exit_code if stale and options.check else 0


def update(root: pathlib.Path = ROOT, write: bool = True) -> list[pathlib.Path]:
    """Writes the pages and pictures that are out of date, if `write`, and returns their paths."""
    docs, readme = root / "docs", root / "README.md"
    generated, rows = docs / "generated", results.read(docs / "results.json")
    suites = dict.fromkeys(row.suite for row in rows.values() if row.suite)
    panels = {name: plotting.suite(results.find(rows, suite=name)) for name in suites}
    names = {name: f"results/suite_{name}.png" for name, drawn in panels.items() if drawn}
    pictures = {generated / path: panels[name] for name, path in names.items()}
    pictures[docs / "learning_curves.png"] = plotting.suite(rows[name] for name in tables.PICTURE)
    peers = records.read(generated / "benchmarks" / "peers.json").results["peers"].rows
    speeds = "".join(records.tables(row for row in peers if row.measure == "speed"))
    pages = {
        generated / "results.md": tables.page(rows, names),
        generated / "benchmarks.md": records.page(generated / "benchmarks"),
        readme: markdown.fill(
            markdown.read(readme), {"readme": tables.headlines(rows), "speed": speeds}
        ),
        generated / "rules.md": rules.page(generated / "rules"),
    }
    stale = [path for path, text in pages.items() if markdown.read(path) != text]
    stale += [path for path, drawn in pictures.items() if not plotting.is_current(path, drawn)]
    for path in stale if write else ():
        if path in pages:
            markdown.write(path, pages[path])
        else:
            plotting.draw(path, pictures[path])
    return stale


if __name__ == "__main__":
    command_line.run(main)
