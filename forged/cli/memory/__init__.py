"""The commands of `forgectl memory`: devices and blocks of a daemon, and traces in files."""
