"""Networks in pure torch; a model file knows nothing of sharding, compilation or training.

- ``dit``, ``mmdit``, ``unet``, ``diffusers``, ``router``: the built-in experts and router
- ``blocks``, ``embeddings``: their parts and options
- ``attention``: one function with several back ends
- ``calibration``: temperatures that calibrate a router
"""
