"""The tables of speed in docs/results.md, out of what scripts/benchmark.py has measured."""

import pathlib
from collections.abc import Callable, Sequence

from benchmarks import records

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
_RUNNERS = ("Anakin", "Sebulba")


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table as Markdown."""
    made = [headings, ["---"] * len(headings), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in made)


def replay_table(record: records.Record) -> str:
    """Returns the speed of agents that learn from replay, and what the replay takes of it."""
    lines, notes = [], []
    for result in record.results.values():
        found = {(row.unit, row.case.get("runner")): row for row in result.rows}
        alone, share = found["ms", None], found["share", None]
        speeds = [found["agent steps/s", runner].spread for runner in _RUNNERS]
        gradients = [found["gradient steps/s", runner].median for runner in _RUNNERS]
        lines.append(
            [
                f"`{alone.case['experiment']}`",
                *(*speeds, *map(records.short, gradients)),
                f"{records.short(alone.median)} ms, {share.median:.0%}",
            ]
        )
        notes += [f"- {note}\n" for note in result.notes]
    headings = ["experiment", "agent steps/s, Anakin", "Sebulba", "gradient steps/s, Anakin"]
    made = table([*headings, "Sebulba", "replay"], lines)
    return f"{made}\n{''.join(notes)}\n{_source(record, 'replay')}"


def search_table(record: records.Record) -> str:
    """Returns how many decisions a second a search takes, by simulations and by batch."""
    (result,) = record.results.values()
    medians = {
        (row.case["simulations"], row.case["batch"]): records.short(row.median)
        for row in result.rows
    }
    simulations, batches = (sorted({key[axis] for key in medians}) for axis in (0, 1))
    lines = [
        [f"{count} simulations", *(medians[count, batch] for batch in batches)]
        for count in simulations
    ]
    made = table(["decisions/s", *(f"batch {batch}" for batch in batches)], lines)
    return f"{result.about}\n\n{made}\n{_source(record, 'search')}"


def _source(record: records.Record, name: str) -> str:
    made = record.provenance
    commit = "an unknown commit" if made["commit"] is None else f"commit {made['commit'][:10]}"
    return (
        f"`python {record.command}`, {made['host_cores']} host cores, {made['device']}, {commit}; "
        f"[raw data](benchmarks/{name}.json).\n"
    )


_MAKERS: dict[str, Callable[[records.Record], str]] = {
    "replay": replay_table,
    "search": search_table,
}


def tables(folder: pathlib.Path = _FOLDER) -> dict[str, str]:
    """Returns the tables by the name of their marker.

    Raises:
      errors.UserError: a file of results cannot be read.
    """
    return {
        f"speed of {name}": make(records.read(folder / f"{name}.json"))
        for name, make in _MAKERS.items()
    }
