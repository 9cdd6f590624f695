"""The report of a partition: measures, charts, TensorBoard events and one HTML page."""
