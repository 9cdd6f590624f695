"""Members: what is trained alone, where it lies on disk, and what it hands over."""
