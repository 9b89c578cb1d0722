"""Measures the device of this machine in ten minutes: podracers-accelerator [PIECE ...].

Runs the benchmarks `device_PIECE` (scripts/benchmark.py), each in its own process: agreement of
both runners and the CPU; Anakin by batch on Catch, CartPole, Snake and Breakout; Sebulba on Pong
beside EnvPool's own rate; learning. Writes a file of results and a page after each piece. The same
command continues with the pieces that are missing; a piece that is named is measured again.

Exit code 1: a piece failed, or an agent did not learn.
"""

import argparse
import functools
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from podracers import errors
from podracers.commands import command_line
from podracers.scripts.benchmarks import device, records
from podracers.scripts.results import markdown


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="PIECE", help=f"of {', '.join(device.PIECES)}; default: all")
    add("--minutes", type=command_line.count, default=10, metavar="N", help="limit (default: 10)")
    file = "results; the page is beside it (default: runs/accelerator.json)"
    add("--json", type=pathlib.Path, default="runs/accelerator.json", metavar="FILE", help=file)
    options = parser.parse_args()
    for name in options.names:
        errors.require_known("no piece", name, device.PIECES)
    return options


def main() -> int:
    """Measures the missing pieces and writes them."""
    options, start = _parse(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the piece
    file: pathlib.Path = options.json
    record = records.read(file) if file.exists() else None
    with errors.file_errors(f"write '{file}'"):
        file.parent.mkdir(parents=True, exist_ok=True)
    failed, left = [], []
    for name in options.names or device.PIECES:
        if record and not options.names and f"device_{name}" in record.results:
            print(f"{name}: measured before", flush=True)
            continue
        try:
            part = _measure(name, 60.0 * options.minutes - (time.monotonic() - start))
        except subprocess.TimeoutExpired:
            left.append(name)
            continue
        except subprocess.CalledProcessError as error:
            if error.returncode == errors.UserError.exit_code:
                return error.returncode
            failed.append(name)
            continue
        record = device.merge(record, part, file)
        record.write(file)
        title = f"# Measurements of {record.provenance['device']}, by `make accelerator`\n\n"
        section = record.section(file.stem, file.name)
        markdown.write(file.with_suffix(".md"), title + section)
        notes = part.results[f"device_{name}"].notes
        failed += [name] * any("NOT LEARN" in note for note in notes)
    if left:
        print(f"no time left for {', '.join(left)}: the same command continues with them")
    if record:
        print(f"{file}\n{file.with_suffix('.md')}")
    return errors.RunFailure.exit_code if failed else 0


def _measure(name: str, seconds: float) -> records.Record:
    """Runs one piece; `subprocess.TimeoutExpired` if it does not end within `seconds`."""
    script = pathlib.Path(__file__).with_name("benchmark.py")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "part.json"
        words = [f"device_{name}", "--repeats", "3", "--json", str(file)]
        command = [sys.executable, str(script), *words]
        subprocess.run(command, timeout=max(seconds, 0.0), check=True)
        return records.read(file)


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
