"""Measures speed: podracers-benchmark [NAME ...] [--repeats N] [--json FILE].

Rates are warm, in agent steps per second, without compilation, printed as the median and range of
several repeats. Programs are measured alternately, and ratios compare neighbours.

`device` measures the accelerator of this machine. Exit code 1: an agent did not learn.
"""

import argparse
import functools
import pathlib
import shlex
import sys
from collections.abc import Callable

from podracers import errors
from podracers.commands import command_line
from podracers.scripts.benchmarks import (
    agent_speed,
    device,
    entered,
    kernels,
    peers,
    ppo_speed,
    records,
    sebulba_speed,
    starts,
    tpu_estimates,
)
from podracers.training import summary

BENCHMARKS: dict[str, Callable[[argparse.Namespace], records.Result]] = {
    "parity": lambda o: device.benchmark_parity(),
    **{name: lambda o, name=name: ppo_speed.benchmark(name, o.repeats) for name in ppo_speed.TASKS},
    "sebulba_impala": lambda o: sebulba_speed.benchmark_learning(o.repeats, o.gin_bindings),
    "sebulba_environments": lambda o: sebulba_speed.benchmark_environments(
        o.repeats, o.gin_bindings
    ),
    **{
        name: lambda o, name=name: agent_speed.benchmark_agent(name, o.repeats, o.gin_bindings)
        for name in agent_speed.AGENTS
    },
    "learning": lambda o: device.benchmark_learning(),
    "kernels": lambda o: kernels.benchmark(o.libtpu, o.cuda),
    "peers": lambda o: peers.benchmark(o.peers, o.repeats),
    "peers_games": lambda o: peers.benchmark(o.peers, o.repeats, ["connect_four"]),
    "starts": lambda o: starts.benchmark(o.peers, o.repeats, o.checkout),
    "entered": lambda o: entered.benchmark(),
    **{
        f"tpu_{name}": lambda o, name=name: tpu_estimates.benchmark(
            name, o.devices, o.gin_bindings, o.libtpu
        )
        for name in tpu_estimates.EXPERIMENTS
    },
}
GROUPS = {
    "replay": agent_speed.AGENTS,
    "tpu": tuple(name for name in BENCHMARKS if name.startswith("tpu_")),
    "device": ("parity", *ppo_speed.TASKS, "sebulba_environments", "r2d2", "muzero", "learning"),
}
_DEFAULT = ("catch", "sebulba_impala", "replay")


def main() -> int:
    """Parses the command line, measures, prints and writes JSON."""
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    names = [*BENCHMARKS, *GROUPS]
    chosen = f"of {', '.join(names)}; default: {', '.join(_DEFAULT)}"
    add("names", nargs="*", metavar="NAME", help=chosen)
    add("--repeats", type=command_line.count, default=7)
    add("--json", type=command_line.output_file, metavar="FILE")
    several, chips = command_line.SEVERAL, "tpu: numbers of chips (default: 1)"
    add("--devices", type=command_line.count, **several, metavar="N", help=chips)
    bindings = "of the experiment of replay, tpu, ..."
    add("--gin_bindings", **several, metavar="'NAME = VALUE'", help=bindings)
    install = "pip install --no-deps --target DIR libtpu==..."
    compiler = f"tpu, kernels: folder of the TPU compiler ({install})"
    add("--libtpu", type=pathlib.Path, metavar="DIR", help=compiler)
    compiler = "kernels: folder of the GPU compiler (see the error without it)"
    add("--cuda", type=pathlib.Path, metavar="DIR", help=compiler)
    other = "starts: folder of another version of this project"
    add("--checkout", type=pathlib.Path, metavar="DIR", help=other)
    prepared = "peers, peers_games, starts: made by scripts/prepare_peers.sh (default: build/peers)"
    add("--peers", type=pathlib.Path, metavar="DIR", default="build/peers", help=prepared)
    options = parser.parse_args()
    options.devices = options.devices or [1]
    for name in options.names:
        errors.require_known("no benchmark", name, names)
    if "device" in options.names:
        command_line.require_accelerator()
    groups = [GROUPS.get(name, (name,)) for name in options.names or _DEFAULT]
    results = {}
    command = shlex.join(["scripts/benchmark.py", *sys.argv[1:]])
    for name in dict.fromkeys(name for group in groups for name in group):
        results[name] = BENCHMARKS[name](options)
        print(f"{name}: {results[name].about}")
        for row in results[name].rows:
            print(f"  {row.label}: {row.spread} {row.unit}", flush=True)
        for note in results[name].notes:
            print(f"  {note}", flush=True)
        if options.json:  # written once a benchmark, so that a later failure loses nothing
            records.Record(command, results, summary.provenance()).write(options.json)
    notes = [note for result in results.values() for note in result.notes]
    fails = any(device.NOT_LEARNT in note for note in notes)
    return errors.RunFailure.exit_code if fails else 0


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
