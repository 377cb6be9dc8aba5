"""What a run saves, keeps and resumes from."""
