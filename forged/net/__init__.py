"""Networking: the wire protocol, transports, bulk transfers, sessions and the server."""
