"""Metrics of generated images: those that compare features in one file, others in a file named after the metric.

A metric is a ``torchmetrics.Metric``: ``update(images, real=…)`` any number of times, then ``compute()``. Images are
uint8 arrays [n, h, w, 3]. A ``FeatureMetric`` has ``scores(generated, real)`` of all features, float tensors [n, d].
"""
