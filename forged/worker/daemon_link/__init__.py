"""The worker's conversation with the daemon: registration, facts, heartbeats and goodbye."""
