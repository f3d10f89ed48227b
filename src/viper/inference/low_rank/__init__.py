"""The family between the diagonal and the full one: a diagonal plus a matrix of low rank."""
