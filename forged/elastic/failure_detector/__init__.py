"""Failure detection: which workers are lost, dead or stalled, and by what evidence."""
