"""Authenticated connections between workers, and the messages on them."""
