"""Use a trained ensemble: open, sample, save and export it, and show it on a page."""
