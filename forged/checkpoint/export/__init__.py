"""Checkpoints to and from the file formats of other tools."""
