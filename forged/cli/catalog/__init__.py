"""The checkpoints that a daemon's catalogue has of a job: `forgectl ckpt` with the option `--job`."""
