"""Finding, installing and running plugins inside the daemon."""
