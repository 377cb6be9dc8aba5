"""The wire protocol without I/O: frames, messages, streams and outstanding calls."""
