"""The worker's relation to the daemon: registration, heartbeats, and the log of what it waits for."""
