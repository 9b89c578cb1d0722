"""Monte Carlo tree search, and the targets and losses of agents that learn from it."""
