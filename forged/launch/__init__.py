"""`forged launch`: start the workers of a job on this host, restart them, and end them together."""
