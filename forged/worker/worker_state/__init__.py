"""The state of one worker in a session: its view of the job, its world and its progress."""
