"""The report of a partition: measures, charts and one HTML page."""
