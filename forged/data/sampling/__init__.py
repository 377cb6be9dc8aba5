"""The sampler: which samples each rank uses in the next step, and what the steps have used."""
