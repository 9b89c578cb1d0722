"""Tests of the Makefile: what its variables become."""

import configparser
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _printed(*arguments):
    # Without the lines that make adds when it is run by another make, as `make test` does.
    command = ["make", "--no-print-directory", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


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
    printed = _printed(*variables, "train")
    last = printed.replace("\\\n", " ").splitlines()[-1].split()
    assert last == [".venv/bin/python", "scripts/train.py", *flags.split()]
    for word in last:
        assert not word.startswith("gin/") or (ROOT / word).exists()


def test_all_tests_are_the_quick_ones_and_the_slow_ones():
    marked = re.findall('-m "(.+)"', _printed("STAMP=setup.cfg", "test-all"))
    assert marked == ["not slow and not learning", "slow and not learning"]


def test_an_extra_that_does_not_exist_is_refused():
    # pip would warn alone, and JAX see the CPU alone.
    command = ["make", "--dry-run", "EXTRAS=cuda", "install"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "got 'cuda'" in refused.stderr
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    known = re.search("KNOWN_EXTRAS := (.*)", (ROOT / "Makefile").read_text())[1].split()
    assert sorted(known) == sorted(config["options.extras_require"])
    assert '-e ".[cuda12,brax]"' in _printed("STAMP=no-file", "EXTRAS=cuda12,brax", "no-file")
