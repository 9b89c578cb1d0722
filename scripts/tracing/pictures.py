"""Pictures of profiles: an update of Anakin over time, and the timeline of Sebulba's threads."""

from collections.abc import Mapping
from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.patches
import matplotlib.pyplot as plt
import numpy as np
from results import plotting
from tracing import hlo, traces

_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _BROWN = plotting.COLORS[:6]
_PALE = "#dfe2e7"
_PARTS = {  # in the order in which they are stacked
    "environment": _GREEN,
    "environment/reset": "#8fd0b3",
    "act": _BLUE,
    "act/agent_update": "#7fb2e5",
    "act/agent_update/rule": "#bcd8f3",
    "learn/replay": _PURPLE,
    "learn/gradient/agent_update/rule": "#f9cfa9",
    "learn/gradient/agent_update": "#f4a261",
    "learn/gradient": _ORANGE,
    "learn": "#f7b98a",
    hlo.OTHER: _BROWN,
    traces.BETWEEN: _PALE,
    traces.HOST: plotting.GREY,
}
_ACTIVITIES = {
    "environment": _GREEN,
    "inference": _BLUE,
    "transfer": _PURPLE,
    "learning": _ORANGE,
    "publishing": _RED,
    "compiling": "black",
    "Python": _BROWN,
    "waiting": _PALE,
}
_STEPS_MS = 0.04  # of the timeline: how much of it the part below shows
_ROW = 0.8  # of the distance between two rows


def _legend(of: Any, labels: Mapping[str, str], **options: Any) -> None:
    """Adds a legend of labels and their colours."""
    patches = [matplotlib.patches.Patch(color=color, label=n) for n, color in labels.items()]
    of.legend(handles=patches, fontsize=8, frameon=False, **options)


def draw_program(found: Mapping[str, Any], title: str) -> matplotlib.figure.Figure:
    """Returns a picture of what `shares.of_programs` returned."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9.0, 6.4), height_ratios=(1.0, 1.25), layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    timeline = found["timeline"]
    parts = [part for part in _PARTS if part in timeline["parts"]]
    values = [timeline["parts"][part] for part in parts]
    edges = np.linspace(0, timeline["milliseconds"], len(values[0]) + 1)
    # Steps, for each bin is a mean: a line from one to the next would show what never was.
    above.stackplot(
        edges,
        [[*value, value[-1]] for value in values],
        colors=[_PARTS[part] for part in parts],
        step="post",
        linewidth=0,
    )
    above.set(xlim=(0, timeline["milliseconds"]), ylim=(0, 1), xlabel="ms of one dispatch")
    above.set_ylabel("share of the time")
    above.spines[["top", "right"]].set_visible(False)
    known = {part: share for part in _PARTS if (share := found["shares"].get(part)) is not None}
    labels = {f"{part}  {share:.1%}": _PARTS[part] for part, share in known.items()}
    _legend(above, labels, loc="center left", bbox_to_anchor=(1.0, 0.5))

    operations = found["operations"]
    shares, colors = zip(*((each["share"], _PARTS[each["part"]]) for each in operations))
    names = [f"{each['operation']}  ({each['instruction']})" for each in operations]
    below.barh(range(len(names)), shares, height=_ROW, color=colors)
    below.set_yticks(range(len(names)), names, fontsize=8)
    below.invert_yaxis()
    below.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=1))
    below.set_xlabel("the ten operations that take most of the time: their share of it")
    plotting.tidy(below)
    return figure


def draw_threads(found: Mapping[str, Mapping[str, Any]], title: str) -> matplotlib.figure.Figure:
    """Returns a picture of what `shares.of_threads` returned, by lag."""
    heights = [len(one["shares"]) for one in found.values()]
    longest = max(one["milliseconds"] for one in found.values())
    figure, axes = plt.subplots(
        len(found) + 1,
        1,
        figsize=(10.0, 1.6 + 0.62 * (sum(heights) + 1) + 0.4 * len(found)),
        height_ratios=[*heights, 1],
        layout="constrained",
    )
    figure.suptitle(title, fontsize=11)
    for axis, (lag, one) in zip(axes, found.items()):
        _draw_rows(axis, one, one["shares"], (0.0, longest))
        for start in one["updates_ms"]:
            axis.axvline(start, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axis.set_title(f"lag {lag}: {len(one['updates_ms'])} updates", fontsize=9, loc="left")
    # Below, some steps of the first actor.
    lag, one = [*found.items()][-1]
    actor = next(name for name in one["shares"] if name != "learner")
    steps = [span for span in one["spans"] if span[0] == actor and span[1] == "inference"]
    middle, seen = steps[len(steps) // 2][2], _STEPS_MS * one["milliseconds"]
    _draw_rows(axes[-1], one, [actor], (middle, middle + seen))
    axes[-1].set_title(f"lag {lag}: {seen:.0f} ms of the same, larger", fontsize=9, loc="left")
    axes[-1].set_xlabel("ms")
    names = {name for one in found.values() for of in one["shares"].values() for name in of}
    labels = {name: color for name, color in _ACTIVITIES.items() if name in names}
    _legend(figure, labels, loc="outside lower center", ncols=len(_ACTIVITIES))
    return figure


def _draw_rows(
    axis: matplotlib.axes.Axes,
    one: Mapping[str, Any],
    threads: Any,
    limits: tuple[float, float],
) -> None:
    for row, thread in enumerate(threads):
        # What no span covers is Python's.
        spans = [(thread, "Python", 0, one["milliseconds"])]
        spans += [span for span in one["spans"] if span[0] == thread]
        axis.broken_barh(
            [(start, length) for _, _, start, length in spans],
            (row - _ROW / 2, _ROW),
            color=[_ACTIVITIES[activity] for _, activity, _, _ in spans],
            linewidth=0,
        )
    axis.set_yticks(range(len(threads)), [*threads], fontsize=9)
    axis.set_xlim(limits)
    axis.invert_yaxis()
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
