"""Short programs that use forged; each is a whole script."""
