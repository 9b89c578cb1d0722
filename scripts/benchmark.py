"""Measures speed: podracers-benchmark [NAME ...] [--repeats N] [--json FILE].

Rates are warm, in agent steps per second, without compilation, printed as the median and range of
several repeats. Programs are measured alternately, and ratios compare neighbours.
"""

import argparse
import functools
import pathlib
import re
import shlex
import sys

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
    scale,
    sebulba_speed,
    starts,
    tpu_estimates,
)
from podracers.training import summary

GROUPS = {
    "replay": agent_speed.AGENTS,
    "tpu": tuple(f"tpu_{agent}" for agent in tpu_estimates.EXPERIMENTS),
    "device": tuple(f"device_{piece}" for piece in device.PIECES),
}
_OTHERS = ("catch", "sebulba_impala", "lpg")
# Only where they are named: they are long, or require more packages.
_ALONE = ("costs", "cores", "kernels", "peers", "starts", "entered", "scale")
NAMES = (*_OTHERS, *_ALONE, *(name for group in GROUPS.values() for name in group))
_NAMED = (*_ALONE, *GROUPS["tpu"], *GROUPS["device"])


def _measure(name: str, o: argparse.Namespace) -> records.Result:
    """Returns the result of one benchmark, with the options of the command line."""
    kind, _, part = name.partition("_")
    common = o.repeats, o.gin_bindings
    benchmarks = {
        "costs": lambda: tpu_estimates.benchmark_costs(o.devices, o.price[0], o.price[1], o.libtpu),
        "cores": lambda: tpu_estimates.benchmark_cores(o.repeats, o.libtpu),
        "kernels": lambda: kernels.benchmark(o.libtpu, o.cuda, o.before),
        "peers": lambda: peers.benchmark(o.peers, o.repeats),
        "starts": lambda: starts.benchmark(o.peers, o.repeats, o.checkout),
        "entered": entered.benchmark,
        "scale": lambda: scale.benchmark(o.devices),
        "lpg": lambda: agent_speed.benchmark_lpg(*common),
        "catch": lambda: ppo_speed.benchmark_batches(name, o.repeats, ppo_speed.BATCHES),
        "sebulba_impala": lambda: sebulba_speed.benchmark_learning(*common),
        "device": lambda: device.benchmark(part, *common),
        "tpu": lambda: tpu_estimates.benchmark_agent(part, o.devices, o.gin_bindings, o.libtpu),
        **{agent: lambda: agent_speed.benchmark_agent(name, *common) for agent in GROUPS["replay"]},
    }
    return benchmarks[name if name in benchmarks else kind]()


def _price(text: str) -> tuple[float, str]:
    """Returns dollars and the date of a price."""
    match = re.fullmatch(r"(\d+\.?\d*)@(.+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected DOLLARS@DATE, got '{text}'")
    return float(match[1]), match[2]


def main() -> int:
    """Parses the command line, measures, prints and writes JSON."""
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    names = [*NAMES, *GROUPS]
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(names)}; default: all but tpu, device, {', '.join(_ALONE)}",
    )
    add("--repeats", type=command_line.count, default=7)
    add("--json", type=command_line.output_file, metavar="FILE")
    several, chips = command_line.SEVERAL, "tpu, costs, scale: numbers of chips (default: 1)"
    add("--devices", type=command_line.count, **several, metavar="N", help=chips)
    price = "costs: list price of a chip-hour, and its date, such as 1.2@2025-06"
    add("--price", type=_price, metavar="DOLLARS@DATE", help=price)
    bindings = "of the experiment of replay, lpg, tpu, ..."
    add("--gin_bindings", **several, metavar="'NAME = VALUE'", help=bindings)
    install = "pip install --no-deps --target DIR libtpu==..."
    compiler = f"tpu, costs, cores, kernels: folder of the TPU compiler ({install})"
    add("--libtpu", type=pathlib.Path, metavar="DIR", help=compiler)
    compiler = "kernels: folder of the GPU compiler (see the error without it)"
    add("--cuda", type=pathlib.Path, metavar="DIR", help=compiler)
    add("--before", type=pathlib.Path, metavar="FILE", help="kernels: --json of an earlier count")
    other = "starts: folder of another version of this project"
    add("--checkout", type=pathlib.Path, metavar="DIR", help=other)
    prepared = "peers, starts: folder that scripts/prepare_peers.sh made (default: build/peers)"
    add("--peers", type=pathlib.Path, metavar="DIR", default="build/peers", help=prepared)
    options = parser.parse_args()
    options.devices = options.devices or [1]
    for name in options.names:
        errors.require_known("no benchmark", name, names)
    if "costs" in options.names and not options.price:
        raise errors.UserError("costs: --price DOLLARS@DATE is missing")
    default = [name for name in NAMES if name not in _NAMED]
    chosen = [GROUPS.get(name, (name,)) for name in options.names or default]
    results = {}
    command = shlex.join(["scripts/benchmark.py", *sys.argv[1:]])
    for name in dict.fromkeys(name for names in chosen for name in names):
        results[name] = _measure(name, options)
        print(f"{name}: {results[name].about}")
        for row in results[name].rows:
            print(f"  {row.label}: {row.spread} {row.unit}", flush=True)
        if options.json:  # written once a benchmark, so that a later failure loses nothing
            records.Record(command, results, summary.provenance()).write(options.json)
    return 0


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
