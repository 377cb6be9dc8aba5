"""The files of a model's version, on the host of the client: described, verified, copied out."""
