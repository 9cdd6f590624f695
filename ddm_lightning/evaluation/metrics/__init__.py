"""Metrics of generated images. Those that compare features share a file; each other one has a file of its name.

A metric is a ``torchmetrics.Metric``: ``update(images, real=…)`` any number of times, then ``compute()``. Images are
uint8 arrays [n, h, w, 3]. A ``FeatureMetric`` has ``scores(generated, real)`` of all features, float tensors [n, d].
"""
