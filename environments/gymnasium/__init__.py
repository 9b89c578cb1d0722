"""Adaptor of Gymnasium."""

from environments.gymnasium.gymnasium import Gymnasium

__all__ = ["Gymnasium"]
