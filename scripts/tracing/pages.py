"""Profiles as tables."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from results import markdown

_COLUMNS = (  # of Sebulba's table
    *("environment", "inference", "transfer", "learning", "publishing", "waiting", "Python"),
)


def text(record: Mapping[str, Any]) -> str:
    """Returns a profile in Markdown: its command, its tables, and what it was measured on."""
    made = f"`{record['command']}`, on {record['device']} ({record['host_cores']} host cores)"
    load = f"the machine's load was {record['load']:.1f} at the start"
    if "estimate" in record:
        made = f"`{record['command']}`"
        load = f"compiled for {record['num_devices']} of {record['topology']}"
        parts = _estimate(record)
    else:
        parts = _program(record) if "program" in record else _threads(record["threads"])
    return "\n".join([f"{made}; {load}.\n", *parts])


def _estimate(record: Mapping[str, Any]) -> Iterator[str]:
    found = record["estimate"]
    rate = f", {found['rate']:,.0f} agent steps/s" if found["rate"] else ""
    yield (
        f"An update of {record['agent_steps']} agent steps takes the busiest device "
        f"{found['update']:,.0f} cycles, and a step of its streams {found['step']:,.0f}{rate}.\n"
    )
    programs = found["programs"].items()
    yield markdown.table(
        ["program", "arguments", "temporaries", "cycles", "of which"],
        [
            [
                *(name, f"{each['arguments']:,} bytes", f"{each['temporaries']:,} bytes"),
                *(f"{each['cycles']:,.0f}", each["failure"] or _shares(each)),
            ]
            for name, each in programs
        ],
    )
    yield markdown.table(
        ["largest copies of", "share", "cycles", "passes", "result", "instruction", "line"],
        [
            [
                *(name, f"{copy['cycles'] / each['cycles']:.1%}", f"{copy['cycles']:,.0f}"),
                *(f"{copy['passes']:g}", copy["shape"], f"`{copy['instruction']}`"),
                copy["source"],
            ]
            for name, each in programs
            for copy in each["copies"]
        ],
    )
    for name, each in programs:
        for loop in each["loops"]:
            yield (
                f"{name}: a loop of `{loop['operation']}` ({loop['part']}) depends on data; one "
                f"pass, of {loop['cycles']:,.0f} cycles, is counted wherever it begins.\n"
            )


def _shares(program: Mapping[str, Any]) -> str:
    parts = sorted(program["parts"].items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {cycles / program['cycles']:.0%}" for part, cycles in parts)


def _program(record: Mapping[str, Any]) -> Iterator[str]:
    times, found = np.array(record["untraced_ms"]), record["program"]
    yield (
        f"An update of {record['agent_steps']} agent steps takes {np.median(times):.1f} ms "
        f"({times.min():.1f} to {times.max():.1f}), and {record['traced_ms']:.1f} ms while it is "
        "traced.\n"
    )
    lines = []
    for name, share in sorted(found["shares"].items(), key=lambda item: -item[1]):
        milliseconds, count = found["milliseconds"][name], found["instructions"].get(name)
        each = [f"{count:,.0f}", f"{1e3 * milliseconds / count:.1f}"] if count else ["", ""]
        lines.append([name, f"{share:.1%}", f"{milliseconds:.2f}", *each])
    headings = ["part of an update", "share of the traced time", "ms", "instructions run"]
    yield markdown.table([*headings, "µs each"], lines)
    yield markdown.table(
        ["operation", "instruction", "part", "share", "times an update"],
        [
            [
                *(each["operation"], f"`{each['instruction']}`", each["part"]),
                *(f"{each['share']:.1%}", f"{each['each_update']:,.0f}"),
            ]
            for each in found["operations"]
        ],
    )
    gaps = ", ".join(f"{gap:.2f}" for gap in found["gaps_ms"])
    yield f"Between the programs of two dispatches: {gaps} ms.\n"


def _threads(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield markdown.table(
        ["lag", "thread", *_COLUMNS],
        [
            [str(lag), thread, *(f"{own[n]:.0%}" if n in own else "" for n in _COLUMNS)]
            for lag, one in found.items()
            for thread, own in one["shares"].items()
        ],
    )
    yield markdown.table(
        ["lag", "agent steps/s", "while traced", "what the runner says"],
        [
            [str(n), f"{one['untraced_rate']:,.0f}", f"{one['traced_rate']:,.0f}", one["verdict"]]
            for n, one in found.items()
        ],
    )
