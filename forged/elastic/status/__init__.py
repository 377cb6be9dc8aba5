"""What operators are shown about a job: views and stall reports."""
