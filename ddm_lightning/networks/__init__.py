"""Networks in pure torch; a model file knows nothing of sharding, compilation or training.

- ``dit`` (expert and router), ``mmdit``, ``unet``, ``diffusers``: the built-in networks
- ``blocks``, ``embeddings``: their parts and options
- ``attention``: one function with several back ends
- ``calibration``: temperatures that calibrate a router
"""
