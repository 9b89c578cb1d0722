"""Environments written in JAX, adaptors of other libraries, and wrappers around any environment."""
