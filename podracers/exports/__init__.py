"""Files of a policy, which act without this project."""
