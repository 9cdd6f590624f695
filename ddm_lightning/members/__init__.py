"""Members: the networks that train alone, and what is on disk of each.

- ``run``: an experiment and its folder; ``run_folder``: paths and locks; ``roles``, ``member``: what a member is
- ``initial``: weights to start from; ``meta``, ``artifact``, ``load``, ``signatures``: what is handed over and trusted
- ``flops``, ``cost``: operations, and memory; ``preflight``: checks before a start
- ``status``, ``checkpoints``, ``skipped``: what a member's folder tells of its training
"""
