"""The page of benchmarks: files of results as tables."""

import pathlib
from collections.abc import Mapping

from benchmarks import panels, records

from podracers import errors

_HEAD = """# Benchmarks

Made by `python scripts/report.py` from the files in `{folder}`: do not edit it. An *agent step* is
one decision in one environment. Figures are medians, with the least and the most of all repeats in
brackets; one without brackets was measured once. Rates are warm, with compilation apart. `python
scripts/benchmark.py --compare OLD.json NEW.json` says what became slower between two files.
"""
_GPU = """## On a GPU

Not measured: there is no file of results of a GPU. Anakin against the batch, until more of it
brings no more; Sebulba on Pong against EnvPool alone:

```sh
python scripts/benchmark.py catch cartpole_batches snake_batches \\
    --batches 256 1024 4096 16384 65536 --json {folder}/gpu_anakin.json
python scripts/benchmark.py sebulba --json {folder}/gpu_sebulba.json
```

(`python scripts/benchmark.py gpu` is both at once.) The time in which Pong is solved: `wall_time`
in the first line of `metrics.jsonl` where `episode/return` is 20 or more, after

```sh
python scripts/train.py --gin_file gin/experiments/pong_ppo.gin
```
"""
_GPUS = {"gpu", "cuda", "rocm"}


def read_all(folder: pathlib.Path) -> dict[str, records.Record]:
    """Returns the files of results by name, in the order of the alphabet.

    Raises:
      errors.UserError: there is none, or one holds something else.
    """
    found = {path.stem: records.read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise errors.UserError(
            f"there is no *.json in '{folder}': make one with scripts/benchmark.py --json"
        )
    return found


def text(found: Mapping[str, records.Record], name: str) -> str:
    """Returns the page of files of results, which are in the folder `name` beside it."""
    parts = [_HEAD.format(folder=f"docs/{name}")]
    for stem, record in found.items():
        parts += [f"## {stem}\n", _provenance(record, f"{name}/{stem}.json")]
        together: dict[str, list[records.Result]] = {}  # one benchmark, or one group
        for benchmark, result in record.results.items():
            together.setdefault(result.group or benchmark, []).append(result)
        for heading, own in together.items():
            notes = dict.fromkeys(note for result in own for note in result.notes)
            rows = (row for result in own for row in result.rows)
            parts += [f"### {heading}\n"] * ([*together] != [stem])
            parts += [f"{own[0].about}\n", *panels.tables(rows)]
            parts += ["".join(f"- {note}\n" for note in notes)] * bool(notes)
    if not any(record.provenance["platform"] in _GPUS for record in found.values()):
        parts.append(_GPU.format(folder=f"docs/{name}"))
    return "\n".join(parts)


def _provenance(record: records.Record, file: str) -> str:
    made = record.provenance
    cpu = f", {made['cpu']}" if "cpu" in made else ""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return "\n".join(
        [
            f"- Command: `python {record.command}`; [raw figures]({file})",
            f"- Hardware: {made['device']} ({made['host_cores']} host cores{cpu})",
            f"- Commit: {made['commit'] or 'unknown'}",
            f"- Versions: {versions}\n",
        ]
    )
