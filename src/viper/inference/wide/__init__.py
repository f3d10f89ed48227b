"""Full covariances of nearly as many columns as rows, or more."""
