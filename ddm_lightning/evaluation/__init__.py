"""Score images, ensembles and routers; look closer at a training that has ended: other averages, skipped steps."""
