"""A run of an experiment: configuration, the training loop, checkpoints and logs."""
