"""The workers of a job and the roles that they have in its world."""
