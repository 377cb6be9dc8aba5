"""Verification of checkpoints, and differences between two of them."""
