"""Learned policy gradient: a rule of learning, and how it is learnt."""

from agents.meta.lpg.meta_training import LPG as LPG
