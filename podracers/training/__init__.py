"""A run of an experiment: configuration, the training loop, its directory, logs and results."""
