"""Evaluates a run: podracers-evaluate --run_dir DIR [--episodes N] [--video FILE.gif]."""

from podracers.commands import evaluate

if __name__ == "__main__":
    evaluate.command()
