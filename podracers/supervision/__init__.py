"""Supervision of threads, child processes and simulators: time limits and clean ends."""
