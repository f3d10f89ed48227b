"""Random effects: rows in groups, an arrow-shaped posterior, and the evidence of variance components."""
