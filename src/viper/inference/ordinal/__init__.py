"""Outcomes in ordered levels: rows of a binary outcome with thresholds as offsets."""
