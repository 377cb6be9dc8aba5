"""How the daemon is, and why things happened."""
