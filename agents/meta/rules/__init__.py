"""Rules of learning that were learnt, frozen: agents that they teach, on any network."""

from agents.meta.rules.agent import RuleAgent as RuleAgent
from agents.meta.rules.network import rule_network as rule_network
