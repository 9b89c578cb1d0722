"""Trains an experiment: python scripts/train.py --gin_file gin/experiments/NAME.gin."""

from podracers.commands import train

if __name__ == "__main__":
    train.command()
