"""Logs, metrics and health checks of the daemon."""
