"""Plots learning curves: python scripts/plot.py --run_dir DIR [DIR ...] --out FILE.png.

Runs that differ in nothing but the seed become one curve: the mean over seeds, with the range
between them shaded. A run of a population is several seeds, and one curve for each combination of
its `population_values`. What tells runs apart is what their config.gin says, not how their folders
are called: the same seed under two runners is two curves. Each environment has a panel; its title
says agent, environment and runner, where they are the same for all of its curves, and the legend
what differs. Of several runs of one configuration and one seed, the newest is drawn.
"""

import math
import sys

import matplotlib.pyplot as plt
from results import curves, groups, plotting

from podracers import command_line


def main() -> None:
    """Parses the command line and writes the picture."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--run_dir", action="extend", nargs="+", required=True, metavar="DIR")
    parser.add_argument("--metric", default="episode/return")
    parser.add_argument("--out", required=True, metavar="FILE.png")
    arguments = parser.parse_args()
    runs = [groups.read(path) for path in dict.fromkeys(arguments.run_dir)]
    drawn, said = curves.panels(runs, arguments.metric)
    for line in said:
        print(line, file=sys.stderr)
    columns = min(3, math.ceil(math.sqrt(len(drawn))))
    rows = -(-len(drawn) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(drawn) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, drawn):
        curves.draw(axis, panel, arguments.metric)
    plotting.save(figure, arguments.out)
    count = sum(len(panel.curves) for panel in drawn)
    print(f"{arguments.out}: {count} curve{'s' if count > 1 else ''}")


if __name__ == "__main__":
    command_line.run(main)
