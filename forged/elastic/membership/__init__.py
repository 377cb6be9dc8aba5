"""The registered workers of a job and their roles in its world."""
