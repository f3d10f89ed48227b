"""Many columns: full covariances for nearly as many columns as rows, and mean fields without d × d matrices."""
