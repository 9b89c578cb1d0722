"""Measures speed: python scripts/benchmark.py [NAME ...] [--repeats N] [--json FILE].

Every rate is warm, in agent steps per second, with compilation apart; it is printed as a median
with the least and the most of several repeats. Where programs are compared, they take turns, and
the ratio is taken turn by turn: machines drift, ratios do not.
"""

import argparse
import dataclasses
import functools
import pathlib
import re
import shlex
import sys
from collections.abc import Callable

from benchmarks import agent_speed as training
from benchmarks import ppo_speed as anakin
from benchmarks import records, replay, scaling, startup
from benchmarks import search_speed as search
from benchmarks import sebulba_speed as sebulba

from podracers import command_line, errors
from podracers.training import run_directory

_REPLAY = {
    "dqn": "cartpole_dqn",
    "r2d2": "catch_r2d2",
    "sac": "pendulum_sac",
    "muzero": "catch_muzero",
}
_AGENTS = {f"agent_{name}": name for name in training.EXPERIMENTS}
_GROUPS = {
    "sebulba": ("sebulba_impala", "sebulba_ppo", "sebulba_environments"),
    "replay": tuple(_REPLAY),
    "agents": tuple(_AGENTS),
    "gpu": (
        *("catch", "cartpole_batches", "snake_batches"),
        *("sebulba_environments", "sebulba_impala", "sebulba_ppo"),
    ),
}
_Benchmark = Callable[[argparse.Namespace], records.Result]


def _batches(name: str, benchmark: str) -> _Benchmark:
    def run(options: argparse.Namespace) -> records.Result:
        if options.devices:
            return anakin.benchmark_batches_on_devices(
                name, benchmark, options.repeats, options.batches, options.devices
            )
        return anakin.benchmark_batches(name, options.repeats, options.batches)

    return run


def _repeated(benchmark: Callable[[int], records.Result]) -> _Benchmark:
    return lambda options: benchmark(options.repeats)


def _with_bindings(benchmark, setting: sebulba.Setting) -> _Benchmark:
    def run(options: argparse.Namespace) -> records.Result:
        bindings = tuple(options.gin_bindings)
        return benchmark(dataclasses.replace(setting, bindings=bindings), options.repeats)

    return run


def _of_agent(benchmark, name: str) -> _Benchmark:
    return lambda options: benchmark(name, options.repeats, tuple(options.gin_bindings))


def _scaling(options: argparse.Namespace) -> records.Result:
    devices = options.devices or [1, 2, 4, 8]
    return scaling.benchmark_devices(options.repeats, devices, tuple(options.gin_bindings))


def _scaling_processes(options: argparse.Namespace) -> records.Result:
    bindings = tuple(options.gin_bindings)
    return scaling.benchmark_processes(options.repeats, options.processes, bindings)


_BENCHMARKS: dict[str, _Benchmark] = {
    "cartpole": _repeated(functools.partial(anakin.benchmark_ppo, "cartpole")),
    "breakout": _repeated(functools.partial(anakin.benchmark_ppo, "breakout")),
    "breakdown": _repeated(anakin.benchmark_breakdown),
    "overhead": _repeated(anakin.benchmark_overhead),
    "catch": _batches("catch", "catch"),
    "cartpole_batches": _batches("cartpole", "cartpole_batches"),
    "snake_batches": _batches("snake", "snake_batches"),
    "resets": _repeated(anakin.benchmark_resets),
    "startup": _repeated(startup.benchmark_startup),
    **{key: _of_agent(training.benchmark_agent, name) for key, name in _AGENTS.items()},
    "scaling": _scaling,
    "scaling_processes": _scaling_processes,
    "sebulba_impala": _with_bindings(sebulba.benchmark_learning, sebulba.IMPALA),
    "sebulba_ppo": _with_bindings(sebulba.benchmark_learning, sebulba.PPO),
    "sebulba_environments": _with_bindings(sebulba.benchmark_environments, sebulba.ENVIRONMENTS),
    "search": _repeated(search.benchmark_search),
    **{key: _of_agent(replay.benchmark_agent, name) for key, name in _REPLAY.items()},
}


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*_BENCHMARKS, *_GROUPS]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; by default all"
    )
    parser.add_argument("--repeats", type=_positive, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--batches",
        type=_positive,
        nargs="+",
        default=[64, 256, 1024, 4096],
        help="catch, cartpole_batches, snake_batches: environments",
    )
    parser.add_argument(
        "--devices",
        type=_positive,
        nargs="+",
        default=[],
        help="catch, cartpole_batches, snake_batches, scaling: on these numbers of fake devices",
    )
    parser.add_argument(
        "--processes",
        type=_positive,
        nargs="+",
        default=[1, 2, 4],
        help="scaling_processes: in so many processes",
    )
    parser.add_argument(
        "--gin_bindings",
        action="append",
        default=[],
        metavar="'NAME = VALUE'",
        help="agents, replay, scaling, sebulba: over those of the experiment",
    )
    parser.add_argument("--quiet", action="store_true", help="print the JSON alone")
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            raise errors.UserError(f"there is no benchmark '{name}'{errors.nearest(name, names)}")
    chosen = [_GROUPS.get(name, (name,)) for name in options.names or _BENCHMARKS]
    options.names = list(dict.fromkeys(name for names in chosen for name in names))
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)


def _cpu() -> dict[str, str]:
    """Returns what the processor is called, where Linux says so."""
    information = pathlib.Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return {"cpu": found[1].strip()} if found else {}


def main() -> None:
    """Parses the command line, measures, prints and writes JSON."""
    options = _parse()
    command = shlex.join(["scripts/benchmark.py", *sys.argv[1:]])
    provenance = run_directory.provenance() | _cpu()
    results = {}
    for name in options.names:
        results[name] = _BENCHMARKS[name](options)
        if not options.quiet:
            print(f"{name}: {results[name].about}")
            for row in results[name].rows:
                print(f"  {row.text()}", flush=True)
        # After each, for what was measured is not to be lost with what fails later.
        if options.json:
            records.write(options.json, records.Record(command, results, provenance))
    if options.quiet:
        print(records.Record(command, results, provenance).text(), end="")


if __name__ == "__main__":
    command_line.run(main)
