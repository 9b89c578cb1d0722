"""Exports a run's policy: python scripts/export.py --run_dir DIR --out FILE."""

from podracers.commands import export

if __name__ == "__main__":
    export.command()
