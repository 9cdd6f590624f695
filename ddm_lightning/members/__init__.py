"""Members: networks that train alone, their run folder, status and artifacts, and how these make an ensemble."""
