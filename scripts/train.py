"""Trains an experiment: python scripts/train.py --gin_file gin/experiments/NAME.gin."""

from podracers import command_line
from podracers.training import train

if __name__ == "__main__":
    command_line.run(train.main)
