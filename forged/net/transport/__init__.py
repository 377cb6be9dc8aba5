"""Connections on asyncio: TCP, TLS and Unix sockets, and the port behind which they stand."""
