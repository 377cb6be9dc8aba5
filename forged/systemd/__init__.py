"""Integration with systemd: notification, watchdog, socket activation, units."""
