"""Checkpoints: their contents, places and integrity."""
