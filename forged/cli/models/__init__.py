"""The commands of `forgectl models`: the model registry."""
