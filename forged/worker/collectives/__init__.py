"""Collectives between the ranks of a world, with a hub at rank 0."""
