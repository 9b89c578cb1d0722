"""Learned policy gradient: a rule of learning, and how it is learnt."""

from agents.lpg.meta_training import LPG as LPG
