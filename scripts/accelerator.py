"""Says in ten minutes what a machine's device does: python scripts/accelerator.py [PIECE ...].

Measures, piece by piece and each in a process of its own (`scripts/benchmark.py device_PIECE`):
what the device is and does by itself; whether both runners, and the CPU, agree with it; speed over
the batch on Catch, CartPole, Snake and Breakout; Sebulba on Pong beside EnvPool's own rate; memory;
whether agents learn; and, on an accelerator, Pong to 18 with the time that is left. Writes a file
of results and a page after each piece. The same command goes on with the pieces that are not in the
file yet; a piece that is named is measured again.

Exit code 1: a piece failed, or an agent did not learn.
"""

import argparse
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks import device, page, records
from results import markdown

from podracers import command_line, errors

_SCRIPT = pathlib.Path(__file__).with_name("benchmark.py")
_LEAST = 15.0  # seconds: with less no piece is begun
_START = 45.0  # seconds that `pong` may take to start and to end, beside its training
_SAME = ("device", "platform", "host_cores", "versions")
_HEAD = """# What {device} does

Made by `python {command}` (`make accelerator`, on any machine): do not edit it. An *agent
step* is one decision in one environment. Figures are medians, with the least and the most of all
repeats in brackets. Rates are warm, with compilation apart.
"""


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    names, add = [*device.PIECES, *device.LEARNING], parser.add_argument
    add("names", nargs="*", metavar="PIECE", help=f"of {', '.join(names)}; by default all")
    add("--minutes", type=command_line.count, default=10, metavar="N", help="of all (default: 10)")
    add("--repeats", type=command_line.count, default=3)
    several = {"type": command_line.count, "nargs": "+", "metavar": "N"}
    add("--batches", **several, help="environments; default: by the device")
    file = "of results; the page is beside it (default: runs/accelerator.json)"
    add("--json", type=pathlib.Path, default="runs/accelerator.json", metavar="FILE", help=file)
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            raise errors.UserError(f"there is no piece '{name}'{errors.nearest(name, names)}")
    return options


def main() -> int:
    """Parses the command line, measures what is missing, and writes it."""
    options, start = _parse(), time.monotonic()
    record = records.read(options.json) if options.json.exists() else None
    there = record.results if record else {}
    failed, left = [], []
    for name in options.names or (*device.PIECES, *device.LEARNING):
        if not options.names and f"device_{name}" in there:
            print(f"{name}: there already", flush=True)
            continue
        if name == "pong" and not options.names and record and _is_cpu(record):
            print("pong: takes an hour on a CPU; name it to have it", flush=True)
            continue
        remaining = 60.0 * options.minutes - (time.monotonic() - start)
        if remaining < _LEAST + _START * (name == "pong"):
            left.append(name)
            continue
        try:
            part = _measure(name, options, remaining)
        except TimeoutError:
            left.append(name)
            continue
        except errors.RunFailure as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
            continue
        record = _merge(record, part, options.json)
        _write(record, options.json)
        failed += [name] * any("NOT LEARN" in note for note in _notes(part))
    if left:
        print(f"no time was left for {', '.join(left)}: the same command goes on with them")
    if record:
        print(f"{options.json}\n{options.json.with_suffix('.md')}")
    return errors.RunFailure.exit_code if failed else 0


def _is_cpu(record: records.Record) -> bool:
    return record.provenance["platform"] == "cpu"


def _notes(record: records.Record) -> list[str]:
    return [note for result in record.results.values() for note in result.notes]


def _measure(name: str, options: argparse.Namespace, seconds: float) -> records.Record:
    """Returns the results of one piece.

    Raises:
      TimeoutError: it has not ended in time.
      errors.RunFailure, errors.UserError: it has failed, with the last line that it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "part.json"
        command = [sys.executable, str(_SCRIPT), f"device_{name}", "--json", str(file)]
        command += ["--repeats", str(options.repeats)]
        command += ["--seconds", str(max(int(seconds - _START), 1))] * (name == "pong")
        command += ["--batches", *map(str, options.batches)] if options.batches else []
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
        finally:
            _end(process)
        if process.returncode:
            line = (said.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            mistake = process.returncode == errors.UserError.exit_code
            kind = errors.UserError if mistake and name == device.PIECES[0] else errors.RunFailure
            raise kind(line.removeprefix("error: "))
        return records.read(file)


def _end(process: subprocess.Popen) -> None:
    """Ends a piece and whatever it started, however this is left."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _merge(
    record: records.Record | None, part: records.Record, file: pathlib.Path
) -> records.Record:
    """Returns the record with one more piece in it.

    Raises:
      errors.UserError: it is of another machine, or of other versions.
    """
    command = f"scripts/accelerator.py --json {file}"
    if record is None:
        return dataclasses.replace(part, command=command)
    for name in _SAME:
        if record.provenance[name] != part.provenance[name]:
            raise errors.UserError(
                f"{file} holds results of another machine ({name} is not the same): name another "
                "--json"
            )
    commits = (each.provenance["commit"] or "unknown" for each in (record, part))
    commit = ", ".join(dict.fromkeys(part for each in commits for part in each.split(", ")))
    provenance = {**record.provenance, "commit": commit}
    results = {**record.results, **part.results}
    order = [*device.REGISTERED]
    ordered = dict(sorted(results.items(), key=lambda item: order.index(item[0])))
    return records.Record(command, ordered, provenance)


def _write(record: records.Record, file: pathlib.Path) -> None:
    """Writes the file of results, and the page beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    markdown.write(file, record.text())
    head = _HEAD.format(device=record.provenance["device"], command=record.command)
    text = "\n".join([head, *page.section(file.stem, record, file.name)])
    markdown.write(file.with_suffix(".md"), text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # see `_end`
    command_line.run(main)
