"""Agents and their shared parts: one file for each algorithm, independent of runners."""
