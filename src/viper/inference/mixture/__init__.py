"""Mixtures of Gaussians in place of one."""
