"""Adaptor of EnvPool."""

from environments.envpool.envpool import EnvPool, EnvPoolEnvironment

__all__ = ["EnvPool", "EnvPoolEnvironment"]
