"""The worker's process: pulse, forks, SIGTERM and shared counters."""
