"""The partition of a data set into K clusters.

- ``partition``: the partition as data, with the rules that assign samples
- ``build``: fit a partition to a data set
- ``kmeans``, ``lloyd``: balanced k-means in memory, plain k-means over features on disk
- ``nearest``: reproducible nearest centroids
"""
