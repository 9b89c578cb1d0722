"""Checks an environment or an agent: podracers-check NAME."""

from podracers.commands import check

if __name__ == "__main__":
    check.command()
