"""Trains an experiment: podracers-train --gin_file gin/experiments/NAME.gin."""

from podracers.commands import train

if __name__ == "__main__":
    train.command()
