"""The wire protocol without I/O: frames, messages, fact streams, pending calls."""
