"""Islands: members as processes, here and elsewhere, and what they share at a run's URL."""
