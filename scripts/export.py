"""Exports a run's policy: podracers-export --run_dir DIR --out FILE."""

from podracers.commands import export

if __name__ == "__main__":
    export.command()
