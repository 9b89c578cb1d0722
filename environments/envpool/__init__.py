"""Adaptor of EnvPool."""

from environments.envpool.envpool import EnvPool

__all__ = ["EnvPool"]
