"""Plots learning curves: podracers-plot --run_dir DIR [DIR ...] --out FILE.png.

Runs that differ only in the seed become one curve: the mean over seeds, from three seeds on with
Student's 95% interval (shaded; of more than four curves, bars at the last point). A run of a
population is several seeds, with a curve for each combination of its `population_values`. Runs are
distinguished by their config.gin, not by the names of their folders. Each environment has a panel;
the legend has agent, runner and the parameters that differ. Of several runs with one configuration
and one seed, the newest is drawn. A DIR may also be a folder of runs. Runs without the metric are
left out. `--lineage` draws the options of an evolving population over time instead: a colour is a
founder, dotted lines are copies.
"""

import functools

from podracers import errors
from podracers.commands import command_line
from podracers.scripts.results import curves, plotting
from podracers.training import loggers, run_directory


def main() -> None:
    """Parses the command line and writes the picture."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--run_dir", **command_line.SEVERAL, required=True, metavar="DIR")
    parser.add_argument("--metric", default="episode/return")
    file = command_line.output_file
    parser.add_argument("--out", type=file, required=True, metavar="FILE.png")
    parser.add_argument("--lineage", action="store_true", help="of one run with pbt_period")
    options = parser.parse_args()
    if options.lineage:
        if len(options.run_dir) != 1:
            raise errors.UserError(f"--lineage: expected one run, got {len(options.run_dir)}")
        directory = run_directory.RunDirectory(options.run_dir[0])
        directory.require()
        rows = loggers.read_rows(directory.metrics)
        plotting.save(plotting.lineage(rows), options.out)
        return
    runs = [run for path in curves.find(options.run_dir) for run in curves.read(path)]
    panels = curves.panels(runs, options.metric)
    plotting.save(plotting.page(panels, options.metric), options.out)
    count = sum(len(panel.curves) for panel in panels)
    print(f"{options.out}: {count} curve{'s' if count > 1 else ''}")


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
