"""Learned policy gradient (LPG): an update rule and its meta-training."""

from agents.meta.lpg.meta_training import LPG as LPG
