"""The readable reference, the comparisons and the synthetic layers that tests and demos share."""
