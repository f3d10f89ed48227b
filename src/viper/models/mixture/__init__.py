"""Posteriors refined to mixtures of Gaussians."""
