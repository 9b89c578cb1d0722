"""Several processes as one run."""
