"""Trains an experiment: podracers-train --gin_file gin/experiments/NAME.gin.

Later --gin_file and --gin_bindings override earlier ones, and bindings override files. With
--resume, a run continues from its newest undamaged checkpoint, with its own configuration.
"""

import argparse
import datetime
import functools
import pathlib
import tempfile

from podracers import errors
from podracers.commands import command_line
from podracers.hosts import processes
from podracers.training import config, experiment, gin_names, run, run_directory, stop_request

_PROCESSES = """
One run over all devices of several processes, each started with the same command. Slurm and TPU
pods are detected; elsewhere --coordinator, --num_processes and --process_id are needed. All
processes write checkpoints, so all must see the run directory or the folder of
Experiment.checkpoint_directory.
"""


def main() -> int:
    """Parses the command line, trains, and prints the results."""
    parser = command_line.Parser(description=__doc__)
    parser.add_experiment()
    add = parser.add_argument
    add("--list", action="store_true", help="print the names of all experiments, with a line each")
    add("--run_dir", help="default: runs/<experiment>-<runner>-seed<seed>-<date>-<time>")
    add("--resume", action="store_true", help="continue the run in --run_dir")
    help_text = "continue the run in --run_dir if there is one, else begin it: for launchers"
    add("--resume_if_begun", action="store_true", help=help_text)
    add("--initial_run", metavar="DIR", help="begin with the parameters of that run")
    add = parser.add_argument_group("several processes", _PROCESSES).add_argument
    add("--distributed", action="store_true", help="be one of several, or fail")
    add("--coordinator", metavar="HOST:PORT", help="of process 0")
    add("--num_processes", type=int, metavar="N")
    add("--process_id", type=int, metavar="I", help="from 0 to N - 1")
    help_text = "without a sign of life, after which a process counts as lost (default: 60)"
    add("--peer_timeout", type=float, default=60.0, metavar="SECONDS", help=help_text)
    arguments = parser.parse_args()
    if arguments.list:
        print(command_line.table([*gin_names.experiments().items()]))
        return 0
    if arguments.initial_run is not None:
        binding = f"Experiment.initial_run = {arguments.initial_run!r}"
        arguments.gin_bindings = [*arguments.gin_bindings, binding]
    command_line.use_compilation_cache()
    group = processes.Group(arguments.coordinator, arguments.num_processes, arguments.process_id)
    if arguments.distributed or group.coordinator or processes.is_cluster():
        processes.initialize(group, arguments.peer_timeout)
    command_line.require_accelerator()
    with stop_request.StopRequest() as stop:
        return _train(arguments, stop)


def _train(arguments: argparse.Namespace, stop: stop_request.StopRequest) -> int:
    directory = run_directory.RunDirectory(arguments.run_dir) if arguments.run_dir else None
    begun = processes.on_lead(lambda: _begun(arguments, directory))
    files = command_line.gin_files(arguments)
    with tempfile.TemporaryDirectory() as folder:
        # Other processes may not see the run directory of process 0.
        if directory is not None and begun is not None:
            begun_file = directory.config
            if not processes.is_lead():
                begun_file = pathlib.Path(folder) / "config.gin"
                begun_file.write_text(begun, "utf-8")
            files = [str(begun_file), *files]
        settings = experiment.load(files, arguments.gin_bindings)
    text = settings.text()
    processes.require_equal("the configuration", text)
    changes = [] if begun is None else _changes(begun, text)
    parts = settings.build()
    if directory is None:
        runner = type(parts.runner).__name__.lower()
        seeds = f"seed{settings.seed}"
        if parts.runner.population > 1:
            seeds = f"seeds{settings.seed}-{settings.seed + parts.runner.population - 1}"
        stem, now = pathlib.Path(arguments.gin_file[0]).stem, datetime.datetime.now()
        path = f"runs/{stem}-{runner}-{seeds}-{now:%Y%m%d-%H%M%S}"
        directory = run_directory.RunDirectory(processes.on_lead(lambda: path))
    # Nothing is written for a run that cannot start.
    experiment.check(parts, settings.seed, settings.tracker)
    if processes.any_process(bool(stop)):
        return 0
    resume = None if begun is None and arguments.resume_if_begun else begun is not None
    print_line = functools.partial(print, flush=True)
    trainer = run.begin(settings, parts, directory, resume, stop=stop, print_line=print_line)
    if changes:  # the checkpoint fits them
        processes.on_lead(lambda: directory.replace_config(text, trainer.steps))
        if processes.is_lead():
            print(*changes, sep="\n")
    summary = trainer.train()
    if summary:
        _print_summary(summary, directory)
    return 0


def _begun(
    arguments: argparse.Namespace, directory: run_directory.RunDirectory | None
) -> str | None:
    """Returns the text of the configuration that a resumed run began with; None for a new run."""
    if directory is None:
        for option in ("resume", "resume_if_begun"):
            if getattr(arguments, option):
                raise errors.UserError(f"--{option} needs --run_dir: which run to continue")
    elif arguments.resume or (arguments.resume_if_begun and directory.config.is_file()):
        directory.require()
        directory.lock.acquire()
        directory.require_gin()
        return directory.read_config()
    if not arguments.gin_file:
        raise errors.UserError(
            "no --gin_file: name one, such as gin/experiments/snake_ppo.gin, or "
            "continue a run with --resume and --run_dir"
        )
    if directory:
        directory.create(dry_run=True)
    return None


def _changes(begun: str, text: str) -> list[str]:
    """Returns `changed: name: old -> new` for each parameter that a resumed run changes.

    A parameter that `text` lacks was bound, and nothing uses it any more: a parameter of the same
    name replaces it, such as a derived class's.

    Raises:
      errors.UserError: the agent, the environment or the runner is another class, or the run began
        with other parameters.
    """
    old, new = (config.read(source, "config.gin").values for source in (begun, text))
    replaced = {name.rpartition(".")[2]: repr(old[name]) for name in old if name not in new}
    changes = []
    for name, value in sorted(new.items()):
        part, after = name.rpartition(".")[2], repr(value)
        before = repr(old[name]) if name in old else replaced.get(part, "default")
        if before == after:
            continue
        part = name.removeprefix("Experiment.")
        if part in ("agent", "environment", "runner") or part.startswith("initial_"):
            raise errors.UserError(
                f"a resumed run keeps its {part}, {before}: got {after}; begin a new run, in "
                "another --run_dir"
            )
        changes.append(f"changed: {name}: {before} -> {after}")
    return changes


def _print_summary(summary: dict, directory: run_directory.RunDirectory) -> None:
    """Prints the results, each member's in a population, and the run directory."""
    results = summary["evaluation"]
    seeds = results.get("return_by_seed", {})
    over = f"{len(seeds)} seeds" if seeds else f"{results['episodes']} episodes"
    error = f"{results['standard_error']:.2f} (mean and standard error over {over})"
    rows = [("return", f"{results['return']:.2f} ± {error}")]
    if "greedy_return" in results:
        error = results["greedy_standard_error"]
        rows.append(("with greedy actions", f"{results['greedy_return']:.2f} ± {error:.2f}"))
    options = {str(member["seed"]): member["values"] for member in summary.get("members", [])}
    for seed, mean in seeds.items():
        values = (f", {name} = {value:g}" for name, value in options.get(seed, {}).items())
        rows.append((f"  seed {seed}{''.join(values)}", f"{mean:.2f}"))
    rows.append(("random policy", f"{summary['random_policy_return']:.2f}"))
    greedy = results.get("greedy_metrics", {})
    for name, mean in results.get("metrics", {}).items():
        if "/" not in name:
            of_greedy = f", greedy {greedy[name]:.4g}" if name in greedy else ""
            rows.append((name, f"{mean:.4g}{of_greedy}"))
    rows.append(("episode length", f"{results['length']:.1f} agent steps"))
    if results["unfinished"]:
        rows.append(("cut short", f"{results['unfinished']} episodes"))
    rows.append(("agent steps", f"{summary['environment_steps']:,}"))
    if (rate := summary["steps_per_second"]) is not None:
        rows.append(("speed", f"{rate:,.0f} agent steps/s, without compilation"))
    rows.append(("wall time", f"{summary['wall_time_s']:.0f} s"))
    rows += [("device", summary["device"]), ("files", str(directory.path))]
    print("Results", command_line.table(rows), sep="\n")


command = functools.partial(command_line.run, main)
