"""Authentication and authorisation: roles, principals, tokens."""
