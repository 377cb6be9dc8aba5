"""Programs that show what forged does."""
