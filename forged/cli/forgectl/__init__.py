"""`forgectl`: the commands that ask a daemon."""
