"""The partition of a data set into K clusters.

- ``partition``: the partition as data, with the rules that assign samples
- ``build``: a partition of a data set, and its cost at other sizes
- ``kmeans``, ``lloyd``: balanced k-means in memory, plain k-means over features on disk
- ``nearest``, ``rows``: reproducible nearest centroids, and features spread over many files
"""
