"""Runners, and the code that runners and agents share."""
