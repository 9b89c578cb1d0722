"""A package, because packages that others install have the same name."""
