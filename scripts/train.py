"""Trains an experiment: python scripts/train.py --gin_file gin/experiments/NAME.gin.

Later --gin_file and --gin_bindings win over earlier ones, and bindings over files. With --resume, a
run directory goes on from its newest whole checkpoint, with the configuration it was begun with.
"""

import argparse
import datetime
import pathlib

import rich.console
import rich.table

from podracers import command_line, config, errors, experiment, run, run_directory, signals


def main() -> int:
    """Parses the command line, trains, and prints what was reached."""
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gin_file", action="append", default=[], metavar="PATH")
    parser.add_argument("--gin_bindings", action="append", default=[], metavar="'NAME = VALUE'")
    parser.add_argument("--run_dir", help="default: runs/<experiment>-<date>-<time>")
    parser.add_argument("--resume", action="store_true", help="continue the run in --run_dir")
    arguments = parser.parse_args()
    command_line.use_compilation_cache()
    with signals.StopRequest() as stop:
        return _train(arguments, stop)


def _train(arguments: argparse.Namespace, stop: signals.StopRequest) -> int:
    directory = run_directory.RunDirectory(arguments.run_dir or _default(arguments.gin_file))
    gin_files = _gin_files(arguments, directory)
    settings = experiment.load(gin_files, arguments.gin_bindings)
    parts = settings.build()
    experiment.check(parts, settings.seed)  # nothing is written for a run that cannot start
    if stop:
        return 0
    if not arguments.resume:
        directory.create()
        directory.write(directory.config, config.text())
    console = rich.console.Console(highlight=False)
    trainer = run.Run(
        settings, parts, directory, stop=stop, resume=arguments.resume, say=console.print
    )
    if arguments.resume:  # new bindings are kept once the checkpoint is known to fit them
        directory.write(directory.config, config.text())
    summary = trainer.train()
    if summary is not None:
        console.print(_table(summary, directory))
    return 0


def _gin_files(arguments: argparse.Namespace, directory: run_directory.RunDirectory) -> list[str]:
    """Returns the files to read; refuses a run directory that does not suit."""
    if not arguments.resume:
        if not arguments.gin_file:
            raise errors.UserError(
                "no --gin_file: name one, such as gin/experiments/snake_ppo_anakin.gin, or "
                "continue a run with --resume and --run_dir"
            )
        directory.refuse_used()
        return arguments.gin_file
    if arguments.run_dir is None:
        raise errors.UserError("--resume needs --run_dir: which run to continue")
    directory.require()
    return [str(directory.config), *arguments.gin_file]


def _default(gin_files: list[str]) -> str:
    name = pathlib.Path(gin_files[0]).stem if gin_files else "run"
    return f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _table(summary: dict, directory: run_directory.RunDirectory) -> rich.table.Table:
    """Returns what was reached, and where its files are."""
    judged = summary["evaluation"]
    seeds = judged.get("return_by_seed", {})
    over = f"{len(seeds)} seeds" if seeds else f"{judged['episodes']} episodes"
    table = rich.table.Table(show_header=False, title="What was reached", title_justify="left")
    table.add_row(
        "return",
        f"{judged['return']:.2f} ± {judged['standard_error']:.2f} "
        f"(mean and standard error over {over})",
    )
    for seed, mean in seeds.items():
        table.add_row(f"  seed {seed}", f"{mean:.2f}")
    table.add_row("random policy", f"{summary['random_policy_return']:.2f}")
    table.add_row("episode length", f"{judged['length']:.1f} agent steps")
    if judged["unfinished"]:
        table.add_row("cut short", f"{judged['unfinished']} episodes")
    table.add_row("agent steps", f"{summary['environment_steps']:,}")
    rate = summary["steps_per_second"]
    if rate is not None:
        table.add_row("speed", f"{rate:,.0f} agent steps/s, compilation apart")
    table.add_row("wall time", f"{summary['wall_time_s']:.0f} s")
    table.add_row("device", summary["device"])
    table.add_row("files", str(directory.path))
    return table


if __name__ == "__main__":
    command_line.run(main)
