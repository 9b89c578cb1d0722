"""Meta-learning: learned policy gradient, and agents that learnt update rules train."""
