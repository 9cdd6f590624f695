"""Metrics of generated images, one file each, named after the metric.

A metric is a ``torchmetrics.Metric``: ``update(images_or_features, real=…)`` any number of times, then ``compute()``.
Images are uint8 arrays [n, h, w, 3]; features are float tensors [n, d].
"""
