"""Side connections: bulk bytes and file descriptors outside the event loop."""
