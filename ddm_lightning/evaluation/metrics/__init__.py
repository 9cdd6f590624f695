"""Metrics of generated images: those that compare features in one file, others in a file named after the metric.

A metric is a ``torchmetrics.Metric``: ``update(images_or_features, real=…)`` any number of times, then ``compute()``.
Images are uint8 arrays [n, h, w, 3]; features are float tensors [n, d].
"""
