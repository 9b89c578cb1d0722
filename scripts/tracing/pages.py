"""Profiles as tables, and the page that holds them between marks."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from podracers import errors

_COLUMNS = (  # of Sebulba's table
    "environment",
    "inference",
    "transfer",
    "learning",
    "publishing",
    "waiting",
    "Python",
)


def text(record: Mapping[str, Any]) -> str:
    """Returns a profile in Markdown: its command, its tables, and what it was measured on."""
    made = f"`{record['command']}`, on {record['device']} ({record['host_cores']} host cores)"
    load = f"the machine's load was {record['load']:.1f} at the start"
    parts = [f"{made}; {load}.\n"]
    if "program" in record:
        parts += [_slowed(record), *_program(record["program"])]
    else:
        parts += [*_threads(record["threads"])]
    return "\n".join(parts)


def _slowed(record: Mapping[str, Any]) -> str:
    times = np.array(record["untraced_ms"])
    return (
        f"An update of {record['agent_steps']} agent steps takes {np.median(times):.1f} ms "
        f"({times.min():.1f} to {times.max():.1f}), and {record['traced_ms']:.1f} ms while it is "
        "traced.\n"
    )


def _program(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "| part of an update | share of the traced time | ms | instructions run | µs each |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, share in sorted(found["shares"].items(), key=lambda item: -item[1]):
        milliseconds, count = found["milliseconds"][name], found["instructions"].get(name)
        each = f"{count:,.0f} | {1e3 * milliseconds / count:.1f}" if count else " | "
        lines.append(f"| {name} | {share:.1%} | {milliseconds:.2f} | {each} |")
    operations = [
        "| operation | instruction | part | share | times an update |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {each['operation']} | `{each['instruction']}` | {each['part']} | "
            f"{each['share']:.1%} | {each['each_update']:,.0f} |"
            for each in found["operations"]
        ),
    ]
    gaps = ", ".join(f"{gap:.2f}" for gap in found["gaps_ms"])
    return [
        "\n".join(lines) + "\n",
        "\n".join(operations) + "\n",
        f"Between the programs of two dispatches: {gaps} ms.\n",
    ]


def _threads(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        f"| lag | thread | {' | '.join(_COLUMNS)} |",
        f"| --- | --- |{' --- |' * len(_COLUMNS)}",
    ]
    for lag, one in found.items():
        for thread, shares in one["shares"].items():
            cells = [f"{shares[name]:.0%}" if name in shares else "" for name in _COLUMNS]
            lines.append(f"| {lag} | {thread} | {' | '.join(cells)} |")
    speeds = [
        "| lag | agent steps/s | while traced | what the runner says |",
        "| --- | --- | --- | --- |",
        *(
            f"| {lag} | {one['untraced_rate']:,.0f} | {one['traced_rate']:,.0f} | "
            f"{one['verdict']} |"
            for lag, one in found.items()
        ),
    ]
    return ["\n".join(lines) + "\n", "\n".join(speeds) + "\n"]


def replace(page: pathlib.Path, name: str, new: str) -> None:
    """Puts a profile between its marks, `<!-- NAME -->` and `<!-- end of NAME -->`, in a page."""
    before, after = split(page, name)
    page.write_text(f"{before}\n\n{new}\n{after}")


def split(page: pathlib.Path, name: str) -> tuple[str, str]:
    """Returns a page up to the first mark of a profile, and from its last mark on.

    Raises:
      errors.UserError: there is no such page, or it has no such marks.
    """
    try:
        old = page.read_text()
    except OSError as error:
        raise errors.UserError(f"cannot read '{page}': {error.strerror}") from error
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, begins, rest = old.partition(first)
    _, ends, after = rest.partition(last)
    if not begins or not ends:
        raise errors.UserError(f"'{page}' has no place for '{name}': put '{first}' and '{last}'")
    return before + first, last + after
