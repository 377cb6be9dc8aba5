"""Side connections: move bulk bytes and file descriptors outside of the event loop."""
