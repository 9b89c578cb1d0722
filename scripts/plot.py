"""Plots learning curves: podracers-plot --run_dir DIR [DIR ...] --out FILE.png.

Runs that differ only in the seed become one curve: the mean over seeds, from three seeds on with
Student's 95% interval (shaded; of more than four curves, bars at the last point). A run of a
population is several seeds, with a curve for each combination of its `population_values`. Runs are
distinguished by their config.gin, not by the names of their folders. Each environment has a panel;
the legend has agent, runner and the parameters that differ. Where two curves share three tasks of
docs/results.json, another panel has interquartile means over these tasks, with 95% stratified
bootstraps. Of several runs with one configuration and one seed, the newest is drawn. A DIR may also
be a folder of runs. Runs without the metric are left out.
"""

import functools

from podracers.commands import command_line
from podracers.scripts.results import curves, plotting


def main() -> None:
    """Parses the command line and writes the picture."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--run_dir", **command_line.SEVERAL, required=True, metavar="DIR")
    parser.add_argument("--metric", default="episode/return")
    file = command_line.output_file
    parser.add_argument("--out", type=file, required=True, metavar="FILE.png")
    options = parser.parse_args()
    runs = [run for path in curves.find(options.run_dir) for run in curves.read(path)]
    panels = curves.panels(runs, options.metric)
    plotting.save(plotting.page(panels, options.metric), options.out)
    count = sum(len(panel.curves) for panel in panels)
    print(f"{options.out}: {count} curve{'s' if count > 1 else ''}")


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
