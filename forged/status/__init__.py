"""The daemon's status, handlers, fact stories and backups."""
