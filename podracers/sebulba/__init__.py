"""Sebulba: actors step environments on the host, learner devices learn."""

from podracers.sebulba.runner import Sebulba

__all__ = ["Sebulba"]
