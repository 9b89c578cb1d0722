"""Makes docs/benchmarks.md and its pictures: python scripts/benchmark_page.py.

Each docs/benchmarks/*.json, written by `scripts/benchmark.py --json`, becomes a section: tables, a
picture, and what it was measured on. Nothing else goes into the page: make it anew after measuring.
"""

import argparse
import os
import pathlib
from collections.abc import Iterator, Mapping

import matplotlib.pyplot as plt
from benchmarks import drawing, panels, records
from results import plotting

from podracers import command_line, errors

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "docs" / "benchmarks"
_PAGE = _ROOT / "docs" / "benchmarks.md"
_HEAD = """# Benchmarks

Made by `python scripts/benchmark_page.py` from the files in `{folder}`: edit neither this page
nor its pictures. An *agent step* is one decision in one environment. Figures are medians, with the
least and the most of all repeats in brackets; one without brackets was measured once. Rates are
warm, with compilation apart. `python scripts/benchmark_check.py OLD.json NEW.json` says what became
slower between two files.
"""
_GPU = """## On a GPU

Not measured: there is no file of results of a GPU. Anakin against the batch, until more of it
brings no more; Sebulba on Pong against EnvPool alone:

```sh
python scripts/benchmark.py catch cartpole_batches snake_batches \\
    --batches 256 1024 4096 16384 65536 --json {folder}/gpu_anakin.json
python scripts/benchmark.py sebulba --json {folder}/gpu_sebulba.json
```

(`python scripts/benchmark.py gpu` is both at once.) The time in which Pong is solved: `wall_time`
in the first line of `metrics.jsonl` where `episode/return` is 20 or more, after

```sh
python scripts/train.py --gin_file gin/experiments/pong_ppo.gin
```
"""
_GPUS = {"gpu", "cuda", "rocm"}


def sections(record: records.Record) -> Iterator[tuple[str, list[records.Result]]]:
    """Yields what is shown together: benchmarks of one group, or one by itself."""
    together: dict[str, list[records.Result]] = {}
    for name, result in record.results.items():
        together.setdefault(result.group or name, []).append(result)
    yield from together.items()


def read_all(folder: pathlib.Path) -> dict[str, records.Record]:
    """Returns the files of results by name, in the order of the alphabet.

    Raises:
      errors.UserError: there is none, or one holds something else.
    """
    found = {path.stem: records.read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise errors.UserError(
            f"there is no *.json in '{folder}': make one with scripts/benchmark.py --json"
        )
    return found


def picture(stem: str, section: str) -> str:
    """Returns the name of a section's picture."""
    return f"{stem}.png" if stem == section else f"{stem}-{section}.png"


def text(found: Mapping[str, records.Record], folder: str) -> str:
    """Returns the page.

    Args:
      found: files of results by name.
      folder: where they and the pictures are, as seen from the page.
    """
    parts = [_HEAD.format(folder=f"docs/{folder}")]
    for stem, record in found.items():
        parts += [f"## {stem}\n", _provenance(record, f"{folder}/{stem}.json")]
        together = dict(sections(record))
        for name, own in together.items():
            shown = panels.make(row for result in own for row in result.rows)
            notes = dict.fromkeys(note for result in own for note in result.notes)
            heading = [] if [*together] == [stem] else [f"### {name}\n"]
            parts += [*heading, f"{own[0].about}\n"]
            parts += [f"{table}\n" for table in panels.tables(shown)]
            if notes:
                parts.append("\n".join(f"- {note}" for note in notes) + "\n")
            parts.append(f"![The same as a picture.]({folder}/{picture(stem, name)})\n")
    if not any(record.provenance["platform"] in _GPUS for record in found.values()):
        parts.append(_GPU.format(folder=f"docs/{folder}"))
    return "\n".join(parts)


def _provenance(record: records.Record, file: str) -> str:
    made = record.provenance
    cpu = f", {made['cpu']}" if "cpu" in made else ""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return "\n".join(
        [
            f"- Command: `python {record.command}`; [raw figures]({file})",
            f"- Hardware: {made['device']} ({made['host_cores']} host cores{cpu})",
            f"- Commit: {made['commit'] or 'unknown'}",
            f"- Versions: {versions}\n",
        ]
    )


def draw_all(found: Mapping[str, records.Record], folder: pathlib.Path) -> int:
    """Writes the pictures, and returns how many."""
    count = 0
    for stem, record in found.items():
        for name, own in sections(record):
            shown = panels.make(row for result in own for row in result.rows)
            figure = drawing.draw(shown, name)
            plotting.save(figure, folder / picture(stem, name))
            plt.close(figure)
            count += 1
    return count


def main() -> None:
    """Parses the command line, and writes the page and its pictures."""
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=pathlib.Path, default=_RESULTS, metavar="FOLDER")
    parser.add_argument("--out", type=pathlib.Path, default=_PAGE, metavar="FILE.md")
    arguments = parser.parse_args()
    found = read_all(arguments.results)
    folder = pathlib.PurePath(os.path.relpath(arguments.results, arguments.out.parent)).as_posix()
    page = text(found, folder)
    count = draw_all(found, arguments.results)
    try:
        arguments.out.write_text(page)
    except OSError as error:
        raise errors.UserError(f"cannot write '{arguments.out}': {error.strerror}") from error
    print(f"{arguments.out}: {len(found)} files of results, {count} pictures")


if __name__ == "__main__":
    command_line.run(main)
