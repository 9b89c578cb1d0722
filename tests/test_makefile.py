"""Tests of the Makefile: what its variables become."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ((), "--gin_file gin/experiments/snake_ppo.gin"),
        (
            ("EXPERIMENT=pong_impala", "RUNNER=sebulba", "RUN_DIR=runs/mine"),
            "--gin_file gin/experiments/pong_impala.gin --runner sebulba --run_dir runs/mine",
        ),
    ],
)
def test_train(variables, flags):
    # Without the lines that make adds when it is run by another make, as `make test` does.
    command = ["make", "--no-print-directory", "--dry-run", *variables, "train"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    last = printed.replace("\\\n", " ").splitlines()[-1].split()
    assert last == [".venv/bin/python", "scripts/train.py", *flags.split()]
    for word in last:
        assert not word.startswith("gin/") or (ROOT / word).exists()
