"""The tables of speed in docs/results.md, out of what scripts/benchmark.py has measured."""

from collections.abc import Callable, Mapping

from benchmarks import records
from results import markdown

_RUNNERS = ("Anakin", "Sebulba")


def _replay(record: records.Record) -> str:
    """Returns the speed of agents that learn from replay, and what the replay takes of it."""
    lines, notes = [], []
    for result in record.results.values():
        found = {(row.unit, row.case.get("runner")): row for row in result.rows}
        alone, share = found["ms", None], found["share", None]
        speeds = [found["agent steps/s", runner].spread for runner in _RUNNERS]
        gradients = [found["gradient steps/s", runner].median for runner in _RUNNERS]
        taken = f"{records.short(alone.median)} ms, {share.median:.0%}"
        name = f"`{alone.case['experiment']}`"
        lines.append([name, *speeds, *map(records.short, gradients), taken])
        notes += [f"- {note}\n" for note in result.notes]
    headings = ["experiment", "agent steps/s, Anakin", "Sebulba", "gradient steps/s, Anakin"]
    return f"{markdown.table([*headings, 'Sebulba', 'replay'], lines)}\n{''.join(notes)}"


def _search(record: records.Record) -> str:
    """Returns how many decisions a second a search takes, by simulations and by batch."""
    (result,) = record.results.values()
    medians = {
        (row.case["simulations"], row.case["batch"]): records.short(row.median)
        for row in result.rows
    }
    simulations, batches = (sorted({key[axis] for key in medians}) for axis in (0, 1))
    lines = [[f"{n} simulations", *(medians[n, batch] for batch in batches)] for n in simulations]
    headings = ["decisions/s", *(f"batch {batch}" for batch in batches)]
    return f"{result.about}\n\n{markdown.table(headings, lines)}"


_MAKERS: dict[str, Callable[[records.Record], str]] = {"replay": _replay, "search": _search}


def tables(found: Mapping[str, records.Record]) -> dict[str, str]:
    """Returns the tables by the name of their mark, out of files of results by name."""
    made = {}
    for name, make in _MAKERS.items():
        record = found[name]
        by = record.provenance
        commit = "an unknown commit" if by["commit"] is None else f"commit {by['commit'][:10]}"
        made[f"speed of {name}"] = (
            f"{make(record)}\n`python {record.command}`, {by['host_cores']} host cores, "
            f"{by['device']}, {commit}; [raw data](benchmarks/{name}.json).\n"
        )
    return made
