"""Use a trained ensemble: open, sample, save and export it, and show it on a page.

- ``ensemble``: the Python API; ``samples``: files of the command line; ``settings``: how it samples
- ``download``, ``saved``: open and write a saved ensemble; ``export``, ``diffusers_pipeline``: other formats; ``page``
"""
