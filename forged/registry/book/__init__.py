"""The pure core of the registry's service."""
