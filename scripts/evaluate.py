"""Evaluates a run: python scripts/evaluate.py --run_dir DIR [--episodes N] [--video FILE.gif]."""

from podracers import command_line
from podracers.training import evaluate

if __name__ == "__main__":
    command_line.run(evaluate.main)
