"""Agents, and what they share: each algorithm stands here once, and knows no runner."""
