"""Trains an experiment: python scripts/train.py --gin_file gin/experiments/NAME.gin."""

from podracers.training import train

if __name__ == "__main__":
    train.command()
