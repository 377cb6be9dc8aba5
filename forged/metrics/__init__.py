"""What a user sees of training: logged values, step times, goodput, losses that are not finite, Python stacks."""
