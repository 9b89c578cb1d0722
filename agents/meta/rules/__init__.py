"""Frozen learned update rules, and agents that they train, with any network."""

from agents.meta.rules.agent import RuleAgent as RuleAgent
from agents.meta.rules.network import rule_network as rule_network
