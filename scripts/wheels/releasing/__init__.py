"""What comes before a release: its steps, its notes, the workflow that builds its wheels."""
