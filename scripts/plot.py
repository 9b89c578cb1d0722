"""Plots learning curves: python scripts/plot.py --run_dir DIR [--run_dir DIR ...] --out FILE.png.

Runs that share an experiment (the name of the folder up to a last `-<seed>`) become one curve: the
mean over seeds, with the range between them shaded. A run of a population is a curve by itself.
"""

import argparse
import collections
import json
import math
import pathlib
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np

from podracers import command_line, errors, run_directory

_METRIC = "episode/return"


def _curves(path: pathlib.Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns agent steps `[K]` and values `[seeds, K]` of one run."""
    directory = run_directory.RunDirectory(path)
    directory.require()
    lines = directory.metrics.read_text().splitlines() if directory.metrics.exists() else []
    # A run that goes on, or was killed, may leave half a line at the end.
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    rows = [row for row in rows if row.get(metric) is not None]
    if not rows:
        raise errors.UserError(f"'{path}' has logged no '{metric}'")
    members = sorted(name for name in rows[0] if name.startswith(f"{metric}/seed_")) or [metric]
    values = [[np.nan if row.get(name) is None else row[name] for row in rows] for name in members]
    return np.array([row["step"] for row in rows]), np.array(values)


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
        runs = [_curves(path, arguments.metric) for path in paths]
        length = min(steps.size for steps, _ in runs)
        steps = runs[0][0][:length]
        values = np.concatenate([values[:, :length] for _, values in runs])
        axis.fill_between(steps, values.min(0), values.max(0), alpha=0.25, linewidth=0)
        axis.plot(steps, values.mean(0), linewidth=1.8)
        seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
        axis.set_title(f"{name} ({seeds})", fontsize=10)
        axis.set_xlabel("agent steps")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axis.set_ylabel(arguments.metric.replace("/", " "))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(arguments.out, dpi=120)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise errors.UserError(f"cannot write '{arguments.out}': {error}") from error
    print(f"{arguments.out}: {len(groups)} curves")


if __name__ == "__main__":
    command_line.run(main)
