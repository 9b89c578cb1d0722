"""Plots learning curves: python scripts/plot.py --run_dir DIR [--run_dir DIR ...] --out FILE.png.

Runs that share an experiment (the name of the folder up to a last `-<seed>`) become one curve: the
mean over seeds, with the range between them shaded. A run of a population is a curve by itself.
"""

import argparse
import collections
import math
import pathlib
import re

import plotting  # isort: skip  (beside this script; chooses matplotlib's backend)
import matplotlib.pyplot as plt
import numpy as np

from podracers import command_line, errors

_METRIC = "episode/return"


def _curves(path: pathlib.Path, metric: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns agent steps and values, both `[K]`, of each seed of one run."""
    steps, values = plotting.series(plotting.read_log(path), metric)
    if not steps.size:
        raise errors.UserError(f"'{path}' has logged no '{metric}'")
    return [(steps, member) for member in values]


def _groups(paths: list[str]) -> dict[str, list[pathlib.Path]]:
    groups = collections.defaultdict(list)
    for path in map(pathlib.Path, paths):
        groups[re.sub(r"-\d+$", "", path.name)].append(path)
    return groups


def main() -> None:
    """Parses the command line and writes the picture."""
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", action="append", required=True, metavar="DIR")
    parser.add_argument("--metric", default=_METRIC)
    parser.add_argument("--out", required=True, metavar="FILE.png")
    arguments = parser.parse_args()
    groups = _groups(arguments.run_dir)
    columns = min(3, math.ceil(math.sqrt(len(groups))))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(groups) :]:
        axis.remove()
    for axis, (name, paths) in zip(axes.flat, groups.items()):
        curves = [curve for path in paths for curve in _curves(path, arguments.metric)]
        plotting.draw_band(axis, plotting.band(curves), color=plotting.COLORS[0])
        seeds = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
        axis.set_title(f"{name} ({seeds})", fontsize=10)
        axis.set_xlabel("agent steps")
        axis.xaxis.set_major_formatter(plotting.engineering())
        axis.set_ylabel(arguments.metric.replace("/", " "))
        plotting.tidy(axis)
    plotting.save(figure, arguments.out)
    print(f"{arguments.out}: {len(groups)} curves")


if __name__ == "__main__":
    command_line.run(main)
