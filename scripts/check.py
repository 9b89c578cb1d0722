"""Checks an environment or an agent: python scripts/check.py NAME."""

from podracers.commands import check

if __name__ == "__main__":
    check.command()
