"""Checkpoints: what is saved, where, and whether it is intact."""
