"""What the daemon and the system's service manager tell each other."""
