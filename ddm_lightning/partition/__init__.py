"""The partition: balanced k-means, assignment rules and their cost."""
