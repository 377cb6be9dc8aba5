"""`forged`: the commands that run, check and install the daemon."""
