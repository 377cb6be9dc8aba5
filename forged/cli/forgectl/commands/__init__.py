"""The commands of `forgectl`, one module each."""
