"""What became slower between two files of results."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from benchmarks import records

from podracers import errors

_HARDWARE = ("device", "platform", "host_cores", "cpu", "processes")


@dataclasses.dataclass(frozen=True)
class Change:
    """How one figure differs between two files."""

    benchmark: str
    old: records.Row
    new: records.Row

    @property
    def worse(self) -> float:
        """By how much it is worse, as a share of the old median; negative where it is better."""
        sign = -1.0 if self.old.better == records.HIGHER else 1.0
        difference = sign * (self.new.median - self.old.median)
        if difference == 0.0:
            return 0.0
        old = abs(self.old.median)
        return difference / old if old else math.copysign(math.inf, difference)

    @property
    def beyond(self) -> bool | None:
        """Whether all repeats of the one are above all of the other; None if measured once."""
        if self.old.min is None or self.new.min is None:
            return None
        return self.new.max < self.old.min or self.old.max < self.new.min

    def text(self) -> str:
        """Returns it in one line."""
        share = f"{abs(self.worse):.1%} {'worse' if self.worse > 0.0 else 'better'}"
        place = {True: "beyond", False: "within"}.get(self.beyond)
        spread = f"{place} the spread of repeats" if place else "the spread of repeats is not known"
        figures = f"{self.old.spread} -> {self.new.spread} {self.old.unit}"
        return f"{self.benchmark}, {self.old.label}: {figures}, {share}, {spread}"


def _rows(record: records.Record) -> dict[tuple, records.Row]:
    """Returns the figures of which one is better than another, by what makes them the same."""
    named = ((name, row) for name, result in record.results.items() for row in result.rows)
    return {(name, *row.key): row for name, row in named if row.better}


def _different_hardware(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns in what two provenances differ that speed depends on; the unknown differs not."""
    known = [name for name in _HARDWARE if name in old and name in new]
    return [f"{name} '{old[name]}' and '{new[name]}'" for name in known if old[name] != new[name]]


def compare(
    files: tuple[str, str], tolerance: float, beyond_spread: bool = False, anyway: bool = False
) -> bool:
    """Prints how the figures differ that two files have in common; returns whether any is worse.

    Args:
      files: the old one, and the new one.
      tolerance: by how much the median may be worse, as a share of the old one.
      beyond_spread: whether what is within the spread of repeats passes.
      anyway: whether to compare what was measured on different hardware.

    Raises:
      errors.UserError: the files do not compare.
    """
    old, new = map(records.read, files)
    if (differing := _different_hardware(old.provenance, new.provenance)) and not anyway:
        raise errors.UserError(
            f"the files are of different hardware ({'; '.join(differing)}): --anyway compares them"
        )
    before, after = _rows(old), _rows(new)
    changes = [Change(key[0], before[key], after[key]) for key in after if key in before]
    if not changes:
        names = f"{', '.join(old.results)}, and {', '.join(new.results)}"
        raise errors.UserError(f"the files have no figure in common: they are of {names}")
    commits = [f"{file} ({of.provenance['commit']})" for file, of in zip(files, (old, new))]
    print(f"{' -> '.join(commits)}: {len(changes)} figures, tolerance {tolerance:.0%}")
    worse = [each for each in changes if each.worse > tolerance]
    noise = [each for each in worse if beyond_spread and each.beyond is False]
    slower = [each for each in worse if each not in noise]
    _print(slower, "slower, or more of what should be less")
    if beyond_spread:
        _print(noise, "let pass, within the spread of repeats")
    _print([each for each in changes if each.worse < -tolerance], "faster, or less")
    for file, one, other in ((files[0], before, after), (files[1], after, before)):
        for key in (key for key in one if key not in other):
            print(f"only in {file}: {key[0]}, {one[key].label}")
    return bool(slower)


def _print(changes: list[Change], heading: str) -> None:
    print(f"{heading}: {len(changes)}")
    for change in sorted(changes, key=lambda change: -abs(change.worse)):
        print(f"  {change.text()}")
