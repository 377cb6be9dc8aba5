"""What forged costs, measured against the best that the machine can do. Run one with `python -m benchmarks.<name>`."""
