"""Runs the coordinators of all jobs in the daemon: their table, their decisions, their timers and probes."""
