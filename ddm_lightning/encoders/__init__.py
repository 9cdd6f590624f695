"""Encoders: images to latents and back, captions to text vectors or tokens, images to features."""
