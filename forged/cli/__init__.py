"""The commands: `forged` runs the daemon, `forgectl` asks it."""
