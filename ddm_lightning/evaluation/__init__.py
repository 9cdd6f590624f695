"""Score generated images, ensembles and routers."""
