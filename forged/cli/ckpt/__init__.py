"""`forgectl ckpt`, one module per command, each loaded when it is used because it needs numpy."""
