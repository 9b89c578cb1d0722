"""Replay memory on the learner devices."""
