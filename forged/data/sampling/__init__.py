"""Which samples each rank takes in the next step, and what the steps have used."""
