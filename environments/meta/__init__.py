"""Families of tasks and lifetimes, for meta-learning."""
