"""Kernels behind plain functions of arrays."""
