"""A plain line to the daemon: blocking, untyped, quick to start, for programs that are small."""
