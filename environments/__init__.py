"""Environments written in JAX, adaptors to those of others, and wrappers around any of them."""
