"""How the daemon shows itself to machines that watch machines."""
