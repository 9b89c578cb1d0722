"""Says what became slower: python scripts/benchmark_check.py OLD.json NEW.json [--tolerance 0.1].

Compares what two files of results (scripts/benchmark.py --json) have in common, median with median.
What is worse by more than the tolerance counts as slower, and the exit code is 1 if anything is; a
rate is worse where it is lower, times and bytes where they are higher, as the files say. Where the
repeats of both files overlap, a difference may be noise, and that is said; --beyond_spread lets it
pass. Exit code 2: the files do not compare.
"""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from benchmarks import records

from podracers import command_line, errors

_HARDWARE = ("device", "platform", "host_cores", "cpu", "processes")


@dataclasses.dataclass(frozen=True)
class Change:
    """How one figure differs between two files.

    Attributes:
      benchmark: its name.
      old: the figure.
      new: the figure.
      worse: by how much, as a share of the old median; negative where it is better.
      beyond: whether all repeats of the one are above all repeats of the other; None where one of
        them was measured once.
    """

    benchmark: str
    old: records.Row
    new: records.Row
    worse: float
    beyond: bool | None

    def text(self) -> str:
        """Returns it in one line."""
        share = f"{abs(self.worse):.1%} {'worse' if self.worse > 0.0 else 'better'}"
        spread = {
            True: "beyond the spread of repeats",
            False: "within the spread of repeats",
            None: "the spread of repeats is not known",
        }[self.beyond]
        return (
            f"{self.benchmark}, {self.old.label}: {self.old.spread} -> {self.new.spread} "
            f"{self.old.unit}, {share}, {spread}"
        )


def compare(old: records.Record, new: records.Record) -> list[Change]:
    """Returns how each figure differs that both have, in the order of the new ones."""
    before = _rows(old)
    return [
        Change(key[0], before[key], row, _worse(before[key], row), _beyond(before[key], row))
        for key, row in _rows(new).items()
        if key in before
    ]


def _rows(record: records.Record) -> dict[tuple, records.Row]:
    """Returns the figures of which one is better than another, by what makes them the same."""
    return {
        (name, *row.key): row
        for name, result in record.results.items()
        for row in result.rows
        if row.better
    }


def _worse(old: records.Row, new: records.Row) -> float:
    sign = -1.0 if old.better == records.HIGHER else 1.0
    difference = sign * (new.median - old.median)
    if difference == 0.0:
        return 0.0
    return difference / abs(old.median) if old.median else math.copysign(math.inf, difference)


def _beyond(old: records.Row, new: records.Row) -> bool | None:
    if old.min is None or new.min is None:
        return None
    return new.max < old.min or old.max < new.min


def hardware(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns in what two provenances differ that speed depends on; the unknown differs not."""
    return [
        f"{name} '{old[name]}' and '{new[name]}'"
        for name in _HARDWARE
        if name in old and name in new and old[name] != new[name]
    ]


def _say(changes: list[Change], heading: str) -> None:
    print(f"{heading}: {len(changes)}")
    for change in sorted(changes, key=lambda change: -abs(change.worse)):
        print(f"  {change.text()}")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a share of at least 0, got '{text}'")
    return value


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD.json")
    parser.add_argument("new", metavar="NEW.json")
    parser.add_argument("--tolerance", type=_share, default=0.1, help="a share of the old median")
    parser.add_argument(
        "--beyond_spread",
        action="store_true",
        help="count as slower only what is beyond the spread of repeats, where that is known",
    )
    parser.add_argument("--anyway", action="store_true", help="though the hardware differs")
    return parser.parse_args()


def main() -> int:
    """Parses the command line, and prints what differs."""
    options = _parse()
    old, new = records.read(options.old), records.read(options.new)
    if (differing := hardware(old.provenance, new.provenance)) and not options.anyway:
        raise errors.UserError(
            f"the files are of different hardware ({'; '.join(differing)}): --anyway compares them"
        )
    changes = compare(old, new)
    if not changes:
        names = f"{', '.join(old.results)}, and {', '.join(new.results)}"
        raise errors.UserError(f"the files have no figure in common: they are of {names}")
    print(f"{options.old} ({old.provenance['commit']}) -> {options.new} ", end="")
    print(
        f"({new.provenance['commit']}): {len(changes)} figures, tolerance {options.tolerance:.0%}"
    )
    worse = [each for each in changes if each.worse > options.tolerance]
    noise = [each for each in worse if options.beyond_spread and each.beyond is False]
    slower = [each for each in worse if each not in noise]
    _say(slower, "slower, or more of what should be less")
    if options.beyond_spread:
        _say(noise, "let pass, within the spread of repeats")
    _say([each for each in changes if each.worse < -options.tolerance], "faster, or less")
    for file, one, other in ((options.old, old, new), (options.new, new, old)):
        alone = [(key[0], row) for key, row in _rows(one).items() if key not in _rows(other)]
        for name, row in alone:
            print(f"only in {file}: {name}, {row.label}")
    return 1 if slower else 0


if __name__ == "__main__":
    command_line.run(main)
